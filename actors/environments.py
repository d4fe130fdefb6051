"""Environments: what answers a model between the turns of its response, in token ids.

Flows in: the tokens of a turn, exactly as they were sampled. Flows out: tokens to append, a reward, and whether that
was the end. What was sampled is never made anew from text.
"""

from __future__ import annotations

import asyncio
import math
import operator
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from counterflow.actors.named import import_named
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROUND_TRIP_S = 1.0
"""A loop that does nothing for so long is taken for blocked."""
_MOST_BLOCKED = 8
"""Threads of an actor that environments may block."""
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
        """Make plain numbers of what libraries have for them. Raises ValueError where that cannot be done."""
        try:
            object.__setattr__(self, "token_ids", tuple(map(operator.index, self.token_ids)))
        except TypeError as error:
            raise ValueError(f"an environment's token ids must be whole numbers, not {self.token_ids!r}") from error
        try:
            object.__setattr__(self, "reward", float(self.reward))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"an environment's reward must be a number, not {self.reward!r}") from error
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
    """Where environments run: an event loop in a thread beside the actor's, and another where one of them blocks it."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._loop = self._begin()

    async def answer(self, call: Callable[[], Awaitable[Answer]], timeout_s: float) -> Answer:
        """What the call answers there; raises what it raises.

        Raises:
            TimeoutError: there is no answer after `timeout_s` seconds.
            RuntimeError: it raised what would end a program, cancel a task, or look like that.
            RunFailed: too many threads are blocked.
        """
        given_up = False

        async def caught() -> tuple[Answer | None, BaseException | None]:
            try:
                # What was given up while it waited for its turn does not begin.
                return None if given_up else await call(), None
            except BaseException as error:  # no error of an environment may end the loop
                return None, error

        loop = self._loop
        coming = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(caught(), loop))
        try:
            async with asyncio.timeout(timeout_s):
                answer, error = await coming
        except TimeoutError:
            given_up = True
            await self._leave_blocked(loop)
            raise
        if isinstance(error, Exception) and not isinstance(error, TimeoutError):
            raise error
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return answer  # type: ignore[return-value]

    async def _leave_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on in another thread where this loop goes round no more."""
        if loop is not self._loop:
            return
        round_trip: Future[None] = Future()
        loop.call_soon_threadsafe(round_trip.set_result, None)
        if (await asyncio.wait([asyncio.wrap_future(round_trip)], timeout=_ROUND_TRIP_S))[0] or loop is not self._loop:
            return
        # One round later than the calls that wait, so that they end as given up.
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) > _MOST_BLOCKED:
            raise RunFailed(
                f"task.environment keeps {len(self._threads)} threads of one actor from going on: have it await what "
                "takes long, in a thread or process of its own"
            )
        self._loop = self._begin()

    def _begin(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        # It does not keep the process: who blocks it may do so for ever.
        self._threads.append(threading.Thread(target=_run, args=(loop,), name="environments", daemon=True))
        self._threads[-1].start()
        weakref.finalize(self, _stop, loop)
        return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # closed before
        loop.call_soon_threadsafe(loop.stop)


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
