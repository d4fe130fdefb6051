"""What is looked at between the steps of a run: accuracy on held-out prompts, and engines against the learner.

Both at one policy version, which is held while they last. Lives in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from counterflow.calls import call
from counterflow.configs.schema import RunConfig
from counterflow.fleet import Fleet
from counterflow.recorder import wilson
from counterflow.records import EvaluationRecord
from counterflow.telemetry import Telemetry
from counterflow.weight_sync.canary import CanaryWatch, Gap
from counterflow.weight_sync.delivery import Delivery

_LOOK_AGAIN_S = 1.0


class Checks:
    """Evaluations and canaries.

    Args:
        learner: the Ray actor.
    """

    def __init__(self, config: RunConfig, learner: Any, fleet: Fleet, delivery: Delivery, telemetry: Telemetry) -> None:
        self._config, self._learner, self._fleet, self._delivery = config, learner, fleet, delivery
        self._telemetry, self._canaries = telemetry, CanaryWatch(config)

    async def evaluate(self, step: int) -> None:
        """Greedy accuracy on the held-out set at one policy version: no other version arrives meanwhile."""
        parts: list[list[float | None]] = []
        while not parts:
            async with self._delivery.hold:
                began, version = self._telemetry.now(), self._delivery.served
                parts = await self._held_out(version)
            if not parts:
                # An actor died of it, or is being replaced, for which the lock must be free.
                await asyncio.sleep(_LOOK_AGAIN_S)
                self._fleet.check()
        flat = [score for part in parts for score in part]
        successes = sum(score is not None and score >= self._config.evaluation.success for score in flat)
        low, high = wilson(successes, len(flat))
        record = EvaluationRecord(
            step=step,
            policy_version=version,
            time_s=self._telemetry.now(),
            successes=successes,
            n=len(flat),
            low=low,
            high=high,
            duration_s=self._telemetry.now() - began,
        )
        self._telemetry.evaluation(record, failed=sum(score is None for score in flat))

    async def compare(self, version: int) -> None:
        """Every so many versions, compare each engine's log-probs with the learner's at the very same version.

        Raises:
            WeightSyncError: they are too far apart.
        """
        sync = self._config.weight_sync
        if not sync.canary_every or version % sync.canary_every:
            return
        await self._delivery.arrived()
        async with self._delivery.hold:
            answers = await self._fleet.ask(
                lambda _, actor: actor.canaries.remote(sync.canary_prompts),
                f"to answer the canaries of version {version}",
                self._config.run.step_timeout_s,
            )
        for index, groups in answers:
            if not groups:
                continue
            reason = f"the learner to score the canaries of version {version}"
            gap: Gap = await call(self._learner.compare.remote(groups), reason, self._config.run.step_timeout_s)
            self._telemetry.canary(index, version, gap)
            self._canaries.look(f"actor {index}", version, gap)

    async def _held_out(self, version: int) -> list[list[float | None]]:
        """Each serving actor's part of the scores; nothing when one of them died."""
        serving = self._fleet.serving
        answers = await self._fleet.ask(
            lambda i, actor: actor.evaluate.remote(serving.index(i), len(serving)),
            f"to evaluate version {version}",
            self._config.run.step_timeout_s,
        )
        return [part for _, part in answers] if len(answers) == len(serving) else []
