"""What a group's episodes are worth: rewards of their text from the pool, with what their environments gave.

Flows in: episodes and their prompt. Flows out: a `Scored` an episode, with its parts, or why there is none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from counterflow.actors.episodes import Episode
from counterflow.actors.reward_process import Scored, zeroed
from counterflow.actors.rewards import ENVIRONMENT, RewardPool
from counterflow.actors.tasks import Prompt
from counterflow.configs.schema import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Scoring:
    """Has a pool score episodes by their last turn; made inside a rollout actor."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, pool: RewardPool) -> None:
        self._config, self._tokenizer, self._pool = config, tokenizer, pool

    async def group(self, admission: int, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored]:
        """Rewards of a group that is trained on, which `reward.truncated` and `reward.shuffle` may change."""
        rewards = await self.episodes(prompt, episodes)
        if self._config.reward.truncated == "zero_reward":
            rewards = [
                zeroed(sample) if episode.finish_reason == "length" else sample
                for sample, episode in zip(rewards, episodes, strict=True)
            ]
        if self._config.reward.shuffle:
            random.Random(f"{self._config.run.seed}/{admission}").shuffle(rewards)
        return rewards

    async def episodes(
        self, prompt: Prompt, episodes: Sequence[Episode], deadline_s: float | None = None
    ) -> list[Scored]:
        """Rewards of one prompt's episodes. Deadline and errors are those of `RewardPool.score_parts`."""
        turns = [self._decode(episode) for episode in episodes]
        scored = await self._pool.score_parts(turns, prompt.record, deadline_s)
        if self._config.task.environment is None:
            return scored
        return [self._with_environment(sample, episode) for sample, episode in zip(scored, episodes, strict=True)]

    def _decode(self, episode: Episode) -> str:
        return str(self._tokenizer.decode(episode.token_ids[episode.last_turn :], skip_special_tokens=True))

    def _with_environment(self, sample: Scored, episode: Episode) -> Scored:
        """The weighted sum again, with one part more."""
        if sample.reward is None:
            return sample
        if episode.reward is None:
            self._pool.note("raised", episode.error)
            return Scored(None, "raised", episode.error)
        weight = (self._config.reward.parts or {}).get(ENVIRONMENT, 1.0)
        return replace(
            sample,
            reward=sample.reward + weight * episode.reward,
            parts=sample.parts | {ENVIRONMENT: episode.reward},
        )
