"""The learner: takes batches of groups from the buffer, makes one policy version after the other, stages them for sync.

One torch process. Groups flow in through a `Consumer`; step records, and weights in shared memory, flow out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from counterflow.buffer.archive import Archive
from counterflow.buffer.connection import Address
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.reading import Reading
from counterflow.buffer.trajectory import Group, Origin
from counterflow.configs.schema import RunConfig
from counterflow.learner.canary import measure
from counterflow.learner.trainer import Trainer, rule_of
from counterflow.learner.verdict import Account, account_of_dropped
from counterflow.processes import pin
from counterflow.records import Interval, StepRecord
from counterflow.weight_sync.canary import Gap
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import Layout, lay_out, named_weights
from counterflow.weight_sync.publisher import Shipment, StagedVersion
from counterflow.weight_sync.transports import open_publisher


@dataclass(frozen=True)
class StepResult:
    """What one step sends to the supervisor."""

    record: StepRecord
    intervals: list[Interval]
    notes: list[str]
    """What the run's owner should know."""


class Learner:
    """The trainer and the buffer's consumer.

    Args:
        folder: the run folder, where consumed groups are archived.
        cores: CPU cores to stay on; None leaves the choice to the system.
        started_at: Unix time of the run's start, the zero of all times reported.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        address: Address,
        origin: Origin,
        started_at: float,
        cores: Sequence[int] | None,
    ) -> None:
        if cores:
            pin(cores)
        self._config, self._started_at = config, started_at
        self._trainer = Trainer(config)
        self._policy = self._trainer.policy
        archive = Archive(folder / "archive", origin, segment_bytes=config.buffer.archive_segment_bytes)
        self._notes: list[str] = []
        self._dropped: list[Account] = []
        self._consumer = Consumer(
            address,
            origin,
            archive,
            _reading(config),
            self._notes.append,
            lambda group: self._dropped.append(account_of_dropped(group)),
        )
        dtype = getattr(torch, config.actors.dtype)
        self._publisher = open_publisher(config, lay_out(named_weights(self._policy.model), dtype), folder)

    def layout(self) -> Layout:
        """What a version consists of, for actors."""
        return self._publisher.layout

    def stage(self, slot: int) -> StagedVersion:
        """Copy the current weights into `slot`, out of the way of the next step."""
        return self._publisher.stage(self._trainer.version, slot, named_weights(self._policy.model))

    def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        """Make a staged version ready for these actors. May run beside a step, as `send` may."""
        return self._publisher.prepare(staged, actors)

    def send(self, staged: StagedVersion) -> Fingerprints:
        """Bring a prepared version to its actors, while they load it; returns what they must hold then."""
        return self._publisher.send(staged)

    def step(self) -> StepResult:
        """Wait for a batch, take one optimizer step on it, commit both together.

        Raises:
            DeadlineExceeded: the batch is not complete within `run.step_timeout_s`.
            RunFailed: see `Trainer.train`.
        """
        waiting = self._now()
        entries = self._consumer.take(self._config.admission.groups_per_step, self._config.run.step_timeout_s)
        training = self._now()
        record, notes = self._trainer.train(entries, sum(self._dropped, Account()))
        self._dropped.clear()
        version = self._trainer.version
        self._consumer.commit(entries, version)
        ledger = self._consumer.ledger()
        end = self._now()
        record = replace(
            record,
            time_s=end,
            wait_s=training - waiting,
            train_s=end - training,
            tokens_generated=ledger.tokens_generated,
            learner_tokens_per_s=record.tokens / (end - training),
            buffer_groups=ledger.buffered,
        )
        intervals = [Interval("learner", "wait", waiting, training), Interval("learner", "train", training, end)]
        return StepResult(record, intervals, self._drain() + notes)

    def compare(self, groups: Sequence[Group]) -> Gap:
        """How far an engine's log-probs of these groups are from the current policy's."""
        tokens = self._config.learner.microbatch_tokens
        return measure(self._policy, groups, self._trainer.version, tokens, self._trainer.pad_token_id)

    def save(self, folder: Path) -> None:
        """Write the current policy, with its tokenizer, as a Hugging Face folder."""
        self._trainer.save(folder)

    def close(self) -> None:
        """Remove the staged weights and leave the buffer."""
        self._publisher.close()
        self._consumer.close()

    def _now(self) -> float:
        return time.time() - self._started_at

    def _drain(self) -> list[str]:
        notes = self._notes.copy()
        self._notes.clear()
        return notes


def _reading(config: RunConfig) -> Reading:
    return Reading(
        order=config.buffer.order,
        uses=config.buffer.uses,
        max_lag=rule_of(config).dropped_past(config.buffer.order),
        drop_equal_rewards=config.buffer.drop_equal_rewards,
    )
