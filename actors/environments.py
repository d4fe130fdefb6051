"""Environments: what answers a model between the turns of its response, in token ids.

Flows in: the tokens of a turn, exactly as they were sampled. Flows out: tokens to append, a reward, and whether that
was the end. What was sampled is never made anew from text.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from counterflow.actors.named import import_named
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = "\u2063the model's turn\u2063"


@dataclass(frozen=True)
class Step:
    """What an environment answers to a turn."""

    token_ids: tuple[int, ...] = ()
    """What follows the turn; the model does not learn to say it."""
    reward: float = 0.0
    """Added to the response's reward."""
    done: bool = False
    """Whether the turn was the last; then nothing follows it."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"an environment's reward must be a finite number, not {self.reward}")


class Environment(Protocol):
    """The other side of one response. Made anew for each, with the model's tokenizer as its only argument.

    Those of an actor share an event loop, in a thread of its own: what takes long without awaiting belongs into another
    thread or a process, lest the others miss their deadline. An exception, or a wait past `task.environment_timeout_s`,
    costs the response its reward.
    """

    async def reset(self, record: dict[str, Any]) -> None:
        """A response to this record's prompt begins."""

    async def step(self, turn_token_ids: Sequence[int]) -> Step:
        """The model has ended a turn, by end of text or a stop text."""


MakeEnvironment = Callable[["PreTrainedTokenizerBase"], Environment]
Answer = TypeVar("Answer")


class EnvironmentLoop:
    """Where environments run: an event loop beside the actor's, which goes on where one of them blocks it, or dies."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # It does not keep the process: who blocks it may do so for ever.
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    async def answer(self, call: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """What the call answers there; raises what it raises.

        Raises:
            TimeoutError: there is no answer after `timeout_s` seconds.
            RuntimeError: it raised what would end a program, or cancels a task.
        """

        async def caught() -> tuple[Answer | None, BaseException | None]:
            try:
                return await call(), None
            except BaseException as error:  # no error of an environment may end the loop
                return None, error

        coming = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(caught(), self._loop))
        async with asyncio.timeout(timeout_s):
            answer, error = await coming
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return answer  # type: ignore[return-value]


def resolve_environment(config: RunConfig) -> MakeEnvironment | None:
    """What makes the environments that `task.environment` names; None where it names none.

    Raises:
        ConfigError: it cannot be imported, or does not fit the rest.
    """
    name = config.task.environment
    if name is None:
        return None
    if name == "calculator":
        from counterflow.actors.calculator import CLOSE, Calculator

        if CLOSE not in config.sampling.stop:
            raise ConfigError(f'task.environment=calculator answers at {CLOSE}: set sampling.stop to ["{CLOSE}"]')
        return Calculator
    if ":" not in name:
        raise ConfigError(
            f"task.environment = {name}: no such environment; it is calculator, or your own as package.module:Class"
        )
    made: MakeEnvironment = import_named("task.environment", name)
    return made


def chat_message(
    tokenizer: PreTrainedTokenizerBase, role: str, content: str, turn_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """The tokens that put a chat message after a turn of the model and open its next turn.

    The chat template is asked for text around a place that the turn would take; the turn itself stays as it is.

    Args:
        turn_token_ids: the turn; where it ends with the token that the template ends it with, that is not repeated.
    """
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _PLACE},
        {"role": role, "content": content},
    ]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    follows = text.partition(_PLACE)[2]
    if turn_token_ids:
        follows = follows.removeprefix(str(tokenizer.decode(turn_token_ids[-1:], skip_special_tokens=False)))
    return tuple(tokenizer.encode(follows, add_special_tokens=False))
