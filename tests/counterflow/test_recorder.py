"""What may go wrong with a run's records: lost or changed values, half-written files, shares outside [0, 1]."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.errors import ConfigError
from counterflow.recorder import (
    Recorder,
    RunRecords,
    busy_shares,
    lag_summary,
    overlap_share,
    read_run,
    summarize,
    wilson,
    write_summary,
)
from counterflow.records import EvaluationRecord, Interval, Ledger, StepRecord


def make_step(step: int, **changes: object) -> StepRecord:
    of_type = {"int": step, "float": step / 7, "list[int]": [0, step], "list[float]": [0.25, 0.75]}
    values = {field.name: of_type[str(field.type)] for field in dataclasses.fields(StepRecord)}
    return StepRecord(**{**values, "step": step, **changes})  # type: ignore[arg-type]


def make_evaluation(step: int, successes: int, n: int = 100) -> EvaluationRecord:
    low, high = wilson(successes, n)
    return EvaluationRecord(step, step, float(step), successes, n, low, high, 0.5)


def make_ledger(**changes: object) -> Ledger:
    ledger = Ledger(10, 6, 1, 1, {"stale": 2}, 100, 60, 10, {"stale": 30})
    return dataclasses.replace(ledger, **changes)  # type: ignore[arg-type]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.add_step(make_step(1, lag_histogram=[], kl_reference=math.inf))
    recorder.add_step(make_step(2, learning_rate=1e-300))
    recorder.add_evaluation(make_evaluation(2, 40))
    recorder.add_intervals([Interval("actor 0", "generate", 0.0, 1.5)])
    recorder.flush()
    assert read_run(tmp_path) == recorder.records


def test_not_a_number_comes_back_as_not_a_number(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.add_step(make_step(1, entropy=math.nan))
    recorder.flush()
    assert math.isnan(read_run(tmp_path).steps[0].entropy)


def test_a_run_without_records_has_files_and_reads_back_empty(tmp_path: Path) -> None:
    assert read_run(tmp_path) == RunRecords([], [], [])
    Recorder(tmp_path).flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "evaluations.parquet", "metrics.parquet", "timeline.parquet",
    ]  # fmt: skip
    assert read_run(tmp_path) == RunRecords([], [], [])


def test_flush_leaves_no_temporary_file_and_rewrites_only_what_changed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.flush()
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    recorder.add_step(make_step(1))
    recorder.flush()
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"metrics.parquet"}


def test_a_damaged_or_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(ConfigError, match=r"metrics\.parquet"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="no such run folder"):
        read_run(tmp_path / "none")


def test_file_that_lacks_a_column_or_a_time_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "timeline.parquet"
    whole = {"owner": ["learner"], "activity": ["train"], "start_s": [0.0], "end_s": [1.0]}
    pq.write_table(pa.table({name: column for name, column in whole.items() if name != "end_s"}), path)
    with pytest.raises(ConfigError, match=r"timeline\.parquet: .*end_s lacks values.*restore it from a copy"):
        read_run(tmp_path)
    pq.write_table(pa.table({**whole, "end_s": [math.nan]}), path)
    with pytest.raises(ConfigError, match=r"timeline\.parquet: .*a time is no number"):
        read_run(tmp_path)


@given(st.integers(0, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_rate(pair: tuple[int, int]) -> None:
    successes, n = pair
    low, high = wilson(successes, n)
    assert 0 <= low <= high <= 1
    if n:
        assert low <= successes / n <= high


def test_wilson_matches_a_worked_value() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 20) == pytest.approx((0.299298, 0.700702), abs=1e-6)


@given(st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=5))
def test_lag_summary_is_that_of_the_expanded_tokens(histograms: list[list[int]]) -> None:
    summary = lag_summary([make_step(1, lag_histogram=histogram) for histogram in histograms])
    lags = np.array([lag for histogram in histograms for lag, count in enumerate(histogram) for _ in range(count)])
    if not len(lags):
        assert summary == {"mean": None, "p95": None, "max": None}
        return
    assert summary["mean"] == pytest.approx(lags.mean())
    assert summary["max"] == lags.max()
    p95 = summary["p95"]
    assert p95 in lags
    assert 100 * (lags <= p95).sum() >= 95 * len(lags) > 100 * (lags < p95).sum()


intervals = st.lists(
    st.builds(
        lambda owner, activity, start, length: Interval(owner, activity, start, start + length),
        st.sampled_from(["learner", "actor 0", "actor 1"]),
        st.sampled_from(["train", "wait", "stage", "generate", "update", "evaluate"]),
        st.floats(0, 10),
        st.floats(0, 5),
    ),
    max_size=20,
)


@given(intervals, st.floats(0, 10), st.floats(0, 10))
def test_shares_are_shares(spans: list[Interval], start: float, end: float) -> None:
    busy, overlap = busy_shares(spans, (start, end)), overlap_share(spans, (start, end))
    for share in (*busy.values(), overlap):
        assert share is None or 0 <= share <= 1
    if overlap is not None:
        assert busy["learner"] is not None
        assert overlap <= busy["learner"] + 1e-9


def test_overlapping_intervals_are_counted_once() -> None:
    spans = [
        Interval("learner", "train", 0, 6),
        Interval("learner", "stage", 5, 8),
        Interval("learner", "wait", 8, 10),
        Interval("actor 0", "generate", 4, 9),
        Interval("actor 0", "generate", 5, 7),
        Interval("actor 1", "wait", 0, 10),
    ]
    assert busy_shares(spans, (0, 10)) == {"learner": pytest.approx(0.8), "actors": pytest.approx(0.25)}
    assert overlap_share(spans, (0, 10)) == pytest.approx(0.2)


def test_summary_of_a_whole_run_is_json() -> None:
    steps = [make_step(n, lag_histogram=[5, 5], tokens=10) for n in (1, 2, 3)]
    records = RunRecords(steps, [make_evaluation(0, 40), make_evaluation(3, 70)], [])
    summary = summarize(records, status="completed", ledger=make_ledger(), wall_s=9.0, max_lag=math.inf, seed=7)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert set(summary) == {
        "status", "reason", "steps", "policy_version", "heldout_before", "heldout_after", "ledger", "lag", "busy",
        "tokens_generated", "tokens_trained", "wall_s", "overlap", "max_lag", "seed", "reward_failures",
    }  # fmt: skip
    assert summary["heldout_before"]["rate"] == 0.4
    assert summary["heldout_after"]["successes"] == 70
    assert summary["ledger"]["closes"] is True
    assert (summary["tokens_generated"], summary["tokens_trained"]) == (100, 30)
    assert summary["max_lag"] == "inf"


def test_summary_of_a_run_that_took_no_step(tmp_path: Path) -> None:
    records = RunRecords([], [make_evaluation(0, 40)], [])
    summary = summarize(records, status="failed", ledger=None, wall_s=1.0, max_lag=4, seed=0, reason="out of memory")
    assert summary["heldout_after"] is None
    assert (summary["steps"], summary["overlap"], summary["lag"]["mean"]) == (0, None, None)
    assert json.loads(write_summary(tmp_path, summary).read_text())["reason"] == "out of memory"


def test_a_ledger_that_does_not_close_says_so() -> None:
    summary = summarize(
        RunRecords([], [], []), status="completed", ledger=make_ledger(trained=5), wall_s=1.0, max_lag=0, seed=0
    )
    assert summary["ledger"]["closes"] is False
