"""What a run leaves behind about itself: step, evaluation and interval records as Parquet, and `summary.json`.

In: frozen records as they happen. Out: whole files in the run folder, and the same records read back. Reads no clock.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from counterflow.errors import ConfigError, first_line
from counterflow.records import EvaluationRecord, Interval, Ledger, StepRecord

__all__ = ["Recorder", "RunRecords", "lag_summary", "read_run", "summarize", "wilson", "write_summary"]

Status: TypeAlias = Literal["completed", "interrupted", "failed"]
Record = TypeVar("Record", StepRecord, EvaluationRecord, Interval)
Span: TypeAlias = tuple[float, float]

GAP_S = 1e-3
"""Two intervals of one activity that lie no further apart are one."""
TIMES = frozenset({"time_s", "start_s", "end_s"})
LEARNER_BUSY = frozenset({"train", "stage"})
ACTOR_BUSY = frozenset({"generate", "evaluate", "update"})
ARROW_TYPES = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    list[int]: pa.list_(pa.int64()),
    list[float]: pa.list_(pa.float64()),
}
SCHEMAS = {
    kind: pa.schema([(name, ARROW_TYPES[hint]) for name, hint in get_type_hints(kind).items()])
    for kind in (StepRecord, EvaluationRecord, Interval)
}


@dataclass(frozen=True)
class RunRecords:
    """Everything a run recorded, in the order it happened."""

    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]
    intervals: list[Interval]


class Recorder:
    """Keeps the records of a run, those that its folder has included, and writes them there at `flush`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = read_run(folder)
        self._written: dict[str, tuple[int, object]] = {}
        self._latest: dict[tuple[str, str], int] = {}

    def add_step(self, record: StepRecord) -> None:
        """Keep one optimizer step."""
        self.records.steps.append(record)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Keep one evaluation."""
        self.records.evaluations.append(record)

    def add_intervals(self, intervals: Iterable[Interval]) -> None:
        """Keep what processes did and when; one that goes on where the last of its kind ended makes that one longer."""
        kept = self.records.intervals
        for interval in intervals:
            kind = (interval.owner, interval.activity)
            at = self._latest.get(kind)
            if at is not None and 0 <= interval.start_s - kept[at].end_s < GAP_S:
                kept[at] = dataclasses.replace(kept[at], end_s=interval.end_s)
            else:
                self._latest[kind] = len(kept)
                kept.append(interval)

    def flush(self) -> None:
        """Write every file that has new records; a reader sees the old file or the new one, never a part."""
        self._write("metrics", StepRecord, self.records.steps)
        self._write("evaluations", EvaluationRecord, self.records.evaluations)
        self._write("timeline", Interval, self.records.intervals)

    def _write(self, name: str, kind: type[Record], records: Sequence[Record]) -> None:
        state = (len(records), records[-1] if records else None)
        if self._written.get(name) == state:
            return
        columns = {
            field.name: [getattr(record, field.name) for record in records] for field in dataclasses.fields(kind)
        }
        temporary = self.folder / f".{name}.parquet.tmp"
        pq.write_table(pa.table(columns, schema=SCHEMAS[kind]), temporary)
        temporary.replace(self.folder / f"{name}.parquet")
        self._written[name] = state


def read_run(folder: Path) -> RunRecords:
    """The records in a run folder; a file that was never written is no records."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such run folder: check the path")
    return RunRecords(
        _read(folder / "metrics.parquet", StepRecord),
        _read(folder / "evaluations.parquet", EvaluationRecord),
        _read(folder / "timeline.parquet", Interval),
    )


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a success rate; (0, 1) when nothing was tried."""
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def lag_summary(steps: Sequence[StepRecord]) -> dict[str, float | int | None]:
    """Mean, 95th percentile and largest lag over all trained tokens; the percentile is a lag that occurred."""
    counts = lag_counts(steps)
    total = sum(counts)
    if total == 0:
        return {"mean": None, "p95": None, "max": None}
    rank, below, p95 = -(-95 * total // 100), 0, 0
    for lag, count in enumerate(counts):
        below += count
        if below >= rank:
            p95 = lag
            break
    return {
        "mean": sum(lag * count for lag, count in enumerate(counts)) / total,
        "p95": p95,
        "max": max(lag for lag, count in enumerate(counts) if count),
    }


def lag_counts(steps: Sequence[StepRecord]) -> list[int]:
    """Trained tokens of the whole run by lag."""
    counts = [0] * max((len(record.lag_histogram) for record in steps), default=0)
    for record in steps:
        for lag, count in enumerate(record.lag_histogram):
            counts[lag] += count
    return counts


def summarize(
    records: RunRecords,
    *,
    status: Status,
    ledger: Ledger | None,
    wall_s: float,
    max_lag: float | None,
    seed: int | None,
    reason: str | None = None,
    reward_failures: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The run in a few numbers, ready for JSON: what cannot be known is null, an unbounded max_lag is "inf".

    Args:
        records: what the run recorded.
        status: how it ended.
        ledger: where every group was at the end; None if nobody could say.
        wall_s: seconds from the run's start to its end.
        max_lag: the configured bound.
        seed: the configured seed.
        reason: why the run was interrupted or failed.
        reward_failures: samples without a reward, evaluations included, by reason.
    """
    steps, evaluations = records.steps, records.evaluations
    last = steps[-1] if steps else None
    before = evaluations[0] if evaluations else None
    after = evaluations[-1] if before and evaluations[-1].policy_version > before.policy_version else None
    span = (steps[0].time_s, steps[-1].time_s) if steps else (0.0, 0.0)
    return {
        "status": status,
        "reason": reason,
        "steps": last.step if last else 0,
        "policy_version": last.policy_version if last else 0,
        "heldout_before": _heldout(before),
        "heldout_after": _heldout(after),
        "ledger": {**dataclasses.asdict(ledger), "closes": ledger.closes} if ledger else None,
        "lag": lag_summary(steps),
        "tokens_generated": ledger.tokens_generated if ledger else last.tokens_generated if last else 0,
        "tokens_trained": sum(record.tokens for record in steps),
        "wall_s": wall_s,
        "busy": busy_shares(records.intervals, span),
        "overlap": overlap_share(records.intervals, span),
        "max_lag": "inf" if max_lag == math.inf else max_lag,
        "seed": seed,
        "reward_failures": reward_failures or {},
    }


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    """Write `summary.json`, whole or not at all."""
    path, temporary = folder / "summary.json", folder / ".summary.json.tmp"
    text = json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False)
    # A reason may name a file whose name is no text.
    temporary.write_text(text + "\n", encoding="utf-8", errors="replace")
    temporary.replace(path)
    return path


def busy_shares(intervals: Sequence[Interval], span: Span) -> dict[str, float | None]:
    """Share of the span in which the learner, and on average an actor, was busy; null for an empty span."""
    length = span[1] - span[0]
    if length <= 0:
        return {"learner": None, "actors": None}
    actors = sorted({interval.owner for interval in intervals if interval.owner != "learner"})
    shares = [_length(_union(intervals, span, {actor}, ACTOR_BUSY)) / length for actor in actors]
    return {
        "learner": min(1.0, _length(_union(intervals, span, {"learner"}, LEARNER_BUSY)) / length),
        "actors": min(1.0, sum(shares) / len(shares)) if shares else None,
    }


def overlap_share(intervals: Sequence[Interval], span: Span) -> float | None:
    """Share of the span in which the learner trains while at least one actor generates; null for an empty span."""
    length = span[1] - span[0]
    if length <= 0:
        return None
    actors = {interval.owner for interval in intervals if interval.owner != "learner"}
    training = _union(intervals, span, {"learner"}, {"train"})
    generating = _union(intervals, span, actors, {"generate"})
    shared, i, j = 0.0, 0, 0
    while i < len(training) and j < len(generating):
        shared += max(0.0, min(training[i][1], generating[j][1]) - max(training[i][0], generating[j][0]))
        if training[i][1] < generating[j][1]:
            i += 1
        else:
            j += 1
    return min(1.0, shared / length)


def _union(
    intervals: Iterable[Interval], span: Span, owners: Iterable[str], activities: Iterable[str]
) -> list[tuple[float, float]]:
    """The stretches of the span covered by any of these, in order and disjoint."""
    owners, activities = frozenset(owners), frozenset(activities)
    clipped = sorted(
        (max(interval.start_s, span[0]), min(interval.end_s, span[1]))
        for interval in intervals
        if interval.owner in owners and interval.activity in activities
    )
    merged: list[tuple[float, float]] = []
    for start, end in clipped:
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(stretches: Iterable[Span]) -> float:
    return math.fsum(end - start for start, end in stretches)


def _heldout(record: EvaluationRecord | None) -> dict[str, float | int] | None:
    if record is None:
        return None
    return {
        "successes": record.successes,
        "n": record.n,
        "rate": record.rate,
        "low": record.low,
        "high": record.high,
    }


def _read(path: Path, kind: type[Record]) -> list[Record]:
    if not path.exists():
        return []
    try:
        with path.open("rb") as file:
            table = pq.read_table(file, schema=SCHEMAS[kind])
        # A column that the file lacks reads as null, and damage may make any number.
        empty = [name for name in table.column_names if table.column(name).null_count]
        if empty:
            raise pa.ArrowInvalid(f"{empty[0]} lacks values")
        rows = table.to_pylist()
        if not all(math.isfinite(row[name]) for row in rows for name in TIMES & row.keys()):
            raise pa.ArrowInvalid("a time is no number")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: not a record file of this version ({first_line(error)}): "
            "restore it from a copy, or use the version of Counterflow that wrote it"
        ) from None
    return [kind(**row) for row in rows]
