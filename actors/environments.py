"""Environments: what answers a model between the turns of its response, in token ids.

Flows in: the tokens of a turn, exactly as they were sampled. Flows out: tokens to append, a reward, and whether that
was the end. What was sampled is never made anew from text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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

    It shares its actor's event loop: what takes long belongs into a thread or a process. An exception, or a wait past
    `task.environment_timeout_s`, costs the response its reward.
    """

    async def reset(self, record: dict[str, Any]) -> None:
        """A response to this record's prompt begins."""

    async def step(self, turn_token_ids: Sequence[int]) -> Step:
        """The model has ended a turn, by end of text or a stop text."""


MakeEnvironment = Callable[["PreTrainedTokenizerBase"], Environment]


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
