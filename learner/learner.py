"""The learner: takes batches of groups from the buffer, makes one policy version after the other, stages them for sync.

Rank 0 of one or several. Groups flow in through a `Consumer`; step records, and weights on their way, flow out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.connection import Address
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.reading import Reading
from counterflow.buffer.segment import ArchivedStep
from counterflow.buffer.store import read_ledger
from counterflow.buffer.trajectory import Group, Origin
from counterflow.configs.schema import RunConfig
from counterflow.learner import branch
from counterflow.learner.checkpoint import (
    CheckpointWriter,
    checkpoint_path,
    chosen_version,
    load_checkpoint,
    read_manifest,
)
from counterflow.learner.lora import adapter_of, trained_weights
from counterflow.learner.replay import entries_of
from counterflow.learner.trainer import Trainer
from counterflow.learner.verdict import Account, account_of_dropped, rule_of
from counterflow.processes import pin
from counterflow.records import Interval, StepRecord
from counterflow.weight_sync.canary import Gap
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import Layout, lay_out
from counterflow.weight_sync.publisher import Shipment, StagedVersion
from counterflow.weight_sync.transports import open_publisher


@dataclass(frozen=True)
class StepResult:
    """What one step sends to the supervisor."""

    record: StepRecord
    intervals: list[Interval]
    notes: list[str]
    """What the run's owner should know."""


@dataclass(frozen=True)
class Standing:
    """Where the learner stands before its first step."""

    version: int
    """The version that it goes on from, once `catch_up` has taken the steps after the checkpoint again."""
    checkpoint: int
    """The version that was loaded; 0 is the model itself."""
    lost: branch.Branch | None
    """The branch that was given up, if one was."""


class Learner:
    """The trainer and the buffer's consumer. `catch_up` comes before the first step.

    It begins with the newest checkpoint in the run folder, and takes the steps that were archived after it again, with
    the same groups in the same order: the archive is the truth of what was trained, a checkpoint a shorter way there.

    Args:
        folder: the run folder, where consumed groups are archived.
        cores: CPU cores to stay on; None leaves the choice to the system.
        started_at: Unix time of the run's start, the zero of all times reported.
        followers: Ray actors of the other ranks (`Follower`).
        checkpoint: version of the checkpoint to begin with, 0 for the model itself; None: the newest.
        lose_branch: give versions up that were made after the checkpoint and cannot be made again.

    Raises:
        ConfigError: the checkpoint cannot be used, or the archive lacks steps after it.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        address: Address,
        origin: Origin,
        started_at: float,
        cores: Sequence[int] | None,
        followers: Sequence[Any] = (),
        checkpoint: int | None = None,
        lose_branch: bool = False,
    ) -> None:
        if cores:
            pin(cores)
        self._config, self._started_at = config, started_at
        self._trainer = Trainer(config, followers)
        self._notes: list[str] = []
        self._dropped: list[Account] = []
        self._checkpoints = CheckpointWriter(
            folder / "checkpoints", origin, config, config.checkpoint.keep, self._notes.append
        )
        begun_with = _load(self._trainer, folder / "checkpoints", origin, config, checkpoint)
        server_version = read_ledger(address, origin.run_id).policy_version
        reached, lost = branch.settle(folder, begun_with, server_version, lose_branch)
        archive = Archive(folder / "archive", origin, segment_bytes=config.buffer.archive_segment_bytes)
        self._consumer = Consumer(
            address,
            origin,
            archive,
            _reading(config),
            self._notes.append,
            lambda group: self._dropped.append(account_of_dropped(group)),
            lost.lost_up_to if lost else None,
        )
        self._behind = _steps(folder / (lost.archive if lost else "archive"), begun_with, reached.version)
        self._standing = Standing(self._consumer.version, begun_with, lost)
        self._publisher = open_publisher(config, _layout(config, self._trainer.policy.model), folder)

    def layout(self) -> Layout:
        """What a version consists of, for actors."""
        return self._publisher.layout

    def stage(self, slot: int) -> StagedVersion:
        """Copy the current weights into `slot`, out of the way of the next step."""
        return self._publisher.stage(self._trainer.version, slot, self._trainer.weights())

    def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        """Make a staged version ready for these actors. May run beside a step, as `send` may."""
        return self._publisher.prepare(staged, actors)

    def send(self, staged: StagedVersion) -> Fingerprints:
        """Bring a prepared version to its actors, while they load it; returns what they must hold then."""
        return self._publisher.send(staged)

    def standing(self) -> Standing:
        """Where the learner stands. No actor may live yet: what was leased is given out again."""
        self._consumer.release_leases()
        return self._standing

    def catch_up(self) -> StepResult | None:
        """Take the next step again that was archived after the checkpoint; None when there is none.

        Raises:
            RunFailed: see `Trainer.train`.
        """
        step = next(self._behind, None)
        if step is None:
            if self._standing.lost is not None:
                self._trainer.version = self._standing.version
            return None
        began = self._now()
        record, notes = self._trainer.train(entries_of(step))
        return self._result(record, notes, began, began)

    def checkpoint(self) -> None:
        """Copy the current version out of the optimizer's way; it is written beside the next steps."""
        if not self._trainer.is_new:
            self._checkpoints.save(self._trainer.state(), self._consumer.ledger())

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
        self._consumer.commit(entries, self._trainer.version)
        return self._result(record, notes, waiting, training)

    def compare(self, groups: Sequence[Group]) -> Gap:
        """How far an engine's log-probs of these groups are from the current policy's."""
        return self._trainer.compare(groups)

    def save(self, folder: Path) -> list[str]:
        """Write the current policy, with its tokenizer, as a Hugging Face folder; and let checkpoints be finished.

        Returns what the run's owner should know.
        """
        self._trainer.save(folder)
        self._checkpoints.wait(self._config.run.step_timeout_s)
        return self._drain()

    def close(self) -> None:
        """Remove the staged weights and leave the buffer."""
        self._publisher.close()
        self._consumer.close()
        self._trainer.close()

    def _now(self) -> float:
        return time.time() - self._started_at

    def _result(self, record: StepRecord, notes: list[str], waiting: float, training: float) -> StepResult:
        """What a step that has just been taken sends, having waited and trained from these times on."""
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


def _layout(config: RunConfig, model: torch.nn.Module) -> Layout:
    """What travels to the actors: the model, in their dtype, or an adapter as it is."""
    adapter = adapter_of(config, model)
    dtype = torch.float32 if adapter is not None else getattr(torch, config.actors.dtype)
    return lay_out(trained_weights(model), dtype, adapter)


def _steps(archive: Path, start: int, end: int) -> Iterator[ArchivedStep]:
    """The steps that made versions `start` + 1 to `end`."""
    return itertools.islice(read_steps(archive, start), end - start) if end > start else iter(())


def _load(trainer: Trainer, folder: Path, origin: Origin, config: RunConfig, asked: int | None) -> int:
    """Have the trainer begin with a checkpoint; returns its version, 0 where there is none."""
    if version := chosen_version(folder, asked):
        path = checkpoint_path(folder, version)
        trainer.load_state(load_checkpoint(path, read_manifest(path, origin, config), trainer.state()))
    return version
