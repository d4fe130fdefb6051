"""Replay: the trainer on archived groups, without actors or server. What a learner that resumes does, and `replay`.

An archive flows in, the records of its steps flow out. With the run's own configuration they are the run's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from counterflow.buffer.archive import read_steps
from counterflow.buffer.codec import from_batch
from counterflow.buffer.segment import ArchivedStep
from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Passage
from counterflow.errors import ConfigError
from counterflow.learner.trainer import Trainer
from counterflow.records import StepRecord


def entries_of(step: ArchivedStep) -> list[Entry]:
    """The groups of an archived step, as they were when they were trained."""
    passages = step.passages or [Passage(-1, -1)] * len(step.groups)
    return [
        Entry(b"", from_batch(batch), passage.added_at, passage.taken_at)
        for batch, passage in zip(step.groups, passages, strict=True)
    ]


def replay(
    trainer: Trainer, archive: Path, until: int | None, max_lag: float
) -> Iterator[tuple[StepRecord | None, int]]:
    """Take the archived steps after the trainer's version, up to version `until`, or to the end.

    Yields the record of each step, or None where no group was left of it, and how many groups were left out since one
    of their tokens has a lag above `max_lag`.

    Raises:
        ConfigError: the archive does not begin where the trainer stands, or does not hold so many steps.
    """
    for step in read_steps(archive, start=trainer.version):
        if until is not None and trainer.version >= until:
            return
        if step.learner_version != trainer.version:
            raise ConfigError(
                f"{archive} begins with step {step.learner_version + 1}, the replay with step {trainer.version + 1}: "
                "begin with a later checkpoint (--checkpoint)"
            )
        entries = entries_of(step)
        fresh = [entry for entry in entries if step.learner_version - _oldest(entry, step) <= max_lag]
        record = None
        if fresh:
            record, _ = trainer.train(fresh)
        else:
            trainer.version += 1
        yield record, len(entries) - len(fresh)
    if until is not None and trainer.version < until:
        raise ConfigError(f"{archive} ends with step {trainer.version}: give --until {trainer.version} or less")


def _oldest(entry: Entry, step: ArchivedStep) -> int:
    oldest = entry.group.oldest_version
    return step.learner_version if oldest is None else oldest
