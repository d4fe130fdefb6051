"""Episodes: responses that an environment answers between their turns, or plain ones where there is none.

Flows in: a prompt, an engine and environments. Flows out: an `Episode` a sample: all tokens, as they were sampled or
appended, and which of them the model is trained on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from counterflow.actors.environments import Environment, EnvironmentLoop, Step, resolve_environment
from counterflow.actors.generation import Completion, Engine
from counterflow.actors.reward_process import describe
from counterflow.actors.seeds import group_seed, turn_seed
from counterflow.actors.tasks import Prompt
from counterflow.buffer.trajectory import BoolArray, spans
from counterflow.configs.schema import RunConfig
from counterflow.errors import RunFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = TypeVar("Answer")
Take = Callable[[Sequence[int], int, int], Awaitable[Completion]]
"""Has an engine take a turn: of the tokens so far, the most tokens it may have, and which turn it is."""


@dataclass(frozen=True)
class Episode(Completion):
    """A response of one or more turns."""

    loss_mask: BoolArray | None = None
    """True where the model sampled the token, false where the environment put it; None: it sampled all."""
    reward: float | None = 0.0
    """What the environment gave; None where it failed."""
    error: str = ""
    """Why it failed."""
    last_turn: int = 0
    """Where the last turn begins, which rewards are given to read."""

    @classmethod
    def of(cls, completion: Completion) -> Episode:
        """A response of one turn, without an environment."""
        return cls(completion.token_ids, completion.logprobs, completion.version_spans, completion.finish_reason)


class EnvironmentFailed(Exception):
    """The environment raised, or did not answer in time."""


class Player:
    """Has an engine respond, and environments answer it."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._last_id = config, max(tokenizer.get_vocab().values())
        self._make = resolve_environment(config)
        if self._make is not None:
            # Another thread's: a tokenizer is not to be used by two at once.
            self._tokenizer, self._loop = deepcopy(tokenizer), EnvironmentLoop()

    async def sample(self, engine: Engine, prompt: Prompt, admission: int) -> list[Episode]:
        """The responses of a group."""
        run = self._config.run
        if self._make is None:
            seed = group_seed(run.seed, admission) if run.deterministic else None
            return [Episode.of(completion) for completion in await engine.sample(prompt.token_ids, seed)]

        def taken_by(sample: int) -> Take:
            def take(token_ids: Sequence[int], room: int, turn: int) -> Awaitable[Completion]:
                seed = turn_seed(run.seed, admission, sample, turn) if run.deterministic else None
                return engine.extend(token_ids, room, seed)

            return take

        samples = range(self._config.admission.samples_per_group)
        return await asyncio.gather(*(self._play(prompt, taken_by(sample)) for sample in samples))

    async def decode_greedily(self, engine: Engine, prompt: Prompt) -> Episode:
        """The response to a held-out prompt, each turn the likeliest."""
        if self._make is None:
            return Episode.of(await engine.decode_greedily(prompt.token_ids))
        return await self._play(prompt, lambda token_ids, room, _: engine.decode_greedily(token_ids, room))

    async def _play(self, prompt: Prompt, take: Take) -> Episode:
        episode = _Episode(self._config.sampling.max_tokens)
        try:
            environment = await self._answer(lambda: self._begin(prompt.record), "reset")
            for turn in range(self._config.task.turns):
                completion = await take((*prompt.token_ids, *episode.token_ids), episode.room, turn)
                episode.sampled(completion)
                if completion.finish_reason != "stop":
                    return episode.end(completion.finish_reason)
                step = await self._step(environment, completion.token_ids.tolist())
                episode.reward += step.reward
                if not math.isfinite(episode.reward):
                    raise EnvironmentFailed(
                        f"the rewards of {self._config.task.environment} add up to no finite number"
                    )
                if step.done:
                    return episode.end("stop")
                if turn + 1 == self._config.task.turns or len(step.token_ids) >= episode.room:
                    # What no turn follows is not appended: it would be read as the model's last word.
                    break
                episode.appended(step.token_ids)
            return episode.end("length")
        except EnvironmentFailed as error:
            return episode.end("stop", str(error))

    async def _begin(self, record: dict[str, Any]) -> Environment:
        assert self._make is not None
        environment = self._make(self._tokenizer)
        await environment.reset(record)
        return environment

    async def _step(self, environment: Environment, token_ids: list[int]) -> Step:
        name = self._config.task.environment
        step = await self._answer(lambda: environment.step(token_ids), "step")
        if not isinstance(step, Step):
            raise EnvironmentFailed(f"step of {name} returned {type(step).__name__}, not a Step")
        if not all(0 <= token <= self._last_id for token in step.token_ids):
            raise EnvironmentFailed(f"step of {name} returned token ids that the tokenizer does not have")
        return step

    async def _answer(self, call: Callable[[], Awaitable[Answer]], name: str) -> Answer:
        limit_s = self._config.task.environment_timeout_s
        try:
            return await self._loop.answer(call, limit_s)
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"{name} of {self._config.task.environment} did not answer within task.environment_timeout_s = "
                f"{limit_s:g} s"
            ) from error
        except RunFailed:
            raise
        except Exception as error:  # a user's environment may raise anything
            raise EnvironmentFailed(f"{name} of {self._config.task.environment} raised {describe(error)}") from error


class _Episode:
    """An episode on its way."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self.token_ids: list[int] = []
        self.reward = 0.0
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._versions: list[int] = []
        self._last_turn = 0

    @property
    def room(self) -> int:
        """How many more tokens there may be."""
        return self._most - len(self.token_ids)

    def sampled(self, completion: Completion) -> None:
        """The model took a turn."""
        self._last_turn = len(self.token_ids)
        self.token_ids += completion.token_ids.tolist()
        self._logprobs += completion.logprobs.tolist()
        self._mask += [True] * len(completion.token_ids)
        for span in completion.version_spans:
            self._versions += [span.version] * (span.end - span.start)

    def appended(self, token_ids: Sequence[int]) -> None:
        """The environment answered. Nothing sampled this: its log-prob is 0, and its version the turn's before it."""
        self.token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)
        self._mask += [False] * len(token_ids)
        self._versions += self._versions[-1:] * len(token_ids)

    def end(self, finish_reason: str, error: str | None = None) -> Episode:
        """The whole; without a reward where there was an error."""
        return Episode(
            token_ids=np.asarray(self.token_ids, np.int32),
            logprobs=np.asarray(self._logprobs, np.float32),
            version_spans=spans(self._versions),
            finish_reason=finish_reason,
            loss_mask=None if all(self._mask) else np.asarray(self._mask, np.bool_),
            reward=self.reward if error is None else None,
            error=error or "",
            last_turn=self._last_turn,
        )
