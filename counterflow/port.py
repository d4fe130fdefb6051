"""The learner's calls that bring weights to the actors, as delivery makes them: through Ray, each under a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterflow.calls import call
from counterflow.records import Interval
from counterflow.telemetry import Telemetry
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.publisher import Shipment, StagedVersion

WEIGHTS = "weights"
"""The learner's calls that run beside its steps."""


class LearnerPort:
    """Meets `Port`.

    Args:
        learner: the Ray actor.
        timeout_s: the longest that any call may take, in seconds.
    """

    def __init__(self, learner: Any, telemetry: Telemetry, timeout_s: float) -> None:
        self._learner, self._telemetry, self._timeout_s = learner, telemetry, timeout_s

    async def stage(self, slot: int) -> StagedVersion:
        """Copy the current weights into a slot. Between two steps of the learner."""
        began = self._telemetry.now()
        staged: StagedVersion = await call(
            self._learner.stage.remote(slot), "the learner to stage its weights", self._timeout_s
        )
        self._telemetry.intervals([Interval("learner", "stage", began, self._telemetry.now())])
        return staged

    async def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        """Make ready to ship to these actors."""
        prepare = self._learner.prepare.options(concurrency_group=WEIGHTS)
        shipment: Shipment = await call(
            prepare.remote(staged, list(actors)), f"policy version {staged.version} to be prepared", self._timeout_s
        )
        return shipment

    async def send(self, staged: StagedVersion) -> Fingerprints:
        """Ship; returns what the actors must hold then."""
        send = self._learner.send.options(concurrency_group=WEIGHTS)
        fingerprints: Fingerprints = await call(
            send.remote(staged), f"policy version {staged.version} to be sent", self._timeout_s
        )
        return fingerprints
