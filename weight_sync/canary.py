"""Canaries: a few prompts answered by an engine and scored by the learner at the same version, now and then.

What is left between the two log-probs is the engine's noise floor: kernels, dtypes, sampling, and nothing of staleness.
A jump of it means that an actor samples from something else than the learner trains. Data and a small memory.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from counterflow.buffer.trajectory import Float32Array
from counterflow.configs.schema import RunConfig
from counterflow.errors import WeightSyncError

_JUMP = 10.0
"""Times the actor's usual gap."""
_NEGLIGIBLE = 0.01
"""Nats a token: no jump below it."""


@dataclass(frozen=True)
class Gap:
    """Differences of log-probs in nats, the engine's minus the learner's at the same version, over the tokens."""

    tokens: int
    mean: float
    """Of the absolute differences, the noise floor."""
    largest: float
    signed: float
    """Mean with signs: above 0 where the engine puts all its mass on fewer tokens."""
    at_temperature_1: float
    """`mean`, had the learner left the temperature out."""

    @classmethod
    def between(cls, engine: Float32Array, learner: Float32Array, at_temperature_1: Float32Array) -> Gap:
        """Of log-probs of the same tokens, float32 [tokens]."""
        difference = engine.astype(np.float64) - learner
        if not len(difference):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        return cls(
            tokens=len(difference),
            mean=float(np.abs(difference).mean()),
            largest=float(np.abs(difference).max()),
            signed=float(difference.mean()),
            at_temperature_1=float(np.abs(engine.astype(np.float64) - at_temperature_1).mean()),
        )


class CanaryWatch:
    """Knows each actor's usual gap and raises when one jumps."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._limit = config, config.weight_sync.canary_limit
        self._usual: defaultdict[str, list[float]] = defaultdict(list)

    def look(self, actor: str, version: int, gap: Gap) -> None:
        """Take in an actor's gap at a version.

        Raises:
            WeightSyncError: it is above `weight_sync.canary_limit`, or ten times what is usual; names likely causes.
        """
        usual = self._usual[actor]
        bound = self._limit
        if usual:
            bound = min(bound, max(_NEGLIGIBLE, _JUMP * statistics.median(usual)))
        if not gap.mean <= bound:
            before = f", {statistics.median(usual):.2g} before" if usual else ""
            raise WeightSyncError(
                f"{actor} and the learner disagree at version {version}: their log-probs of the same tokens differ by "
                f"{gap.mean:.2g} nats on average{before}, {gap.largest:.2g} at most (weight_sync.canary_limit "
                f"{self._limit:g}). Likely: {'; '.join(self._causes(gap))}",
                [actor],
            )
        usual.append(gap.mean)

    def _causes(self, gap: Gap) -> list[str]:
        sampling, found = self._config.sampling, []
        if sampling.temperature != 1 and gap.at_temperature_1 < gap.mean / 2:
            found.append(
                f"sampling.temperature {sampling.temperature:g} is left out on one side (at temperature 1 the gap is "
                f"{gap.at_temperature_1:.2g})"
            )
        if (sampling.top_p < 1 or sampling.top_k > 0) and gap.signed > 0:
            found.append(
                f"sampling.top_p {sampling.top_p:g} or top_k {sampling.top_k} cuts the engine's support, the learner's "
                "is whole"
            )
        if self._config.actors.dtype != self._config.learner.dtype:
            found.append(f"actors.dtype {self._config.actors.dtype} against learner.dtype {self._config.learner.dtype}")
        if not self._config.weight_sync.recompute:
            found.append("key-value cache of older weights (weight_sync.recompute is false)")
        return [
            *found,
            "an update that changed the engine's weights only in part, or its model differs from the learner's",
        ]
