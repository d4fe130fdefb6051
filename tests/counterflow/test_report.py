"""What may go wrong with a report: a run that recorded little, texts that escape, a headline that claims too much."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.configs import RunConfig, dump
from counterflow.errors import ConfigError, OutputError
from counterflow.recorder import Recorder, RunRecords, summarize, wilson, write_summary
from counterflow.records import EvaluationRecord, Interval, Ledger, StepRecord
from counterflow.report import write_report
from counterflow.report.figures import coalesce, moving_average, weighted_lag_shares
from counterflow.report.render import headline

LEDGER = Ledger(3_870, 3_840, 20, 8, {"stale": 2}, 120_000, 118_000, 1_500, {"stale": 500})


def make_records(steps: int, *, actors: int = 2, seconds: float = 1.3, seed: int = 0) -> RunRecords:
    """A run that looks like one: a rising reward, lag up to four, actors and learner that overlap."""
    random.seed(seed)
    records = RunRecords([], [], [])
    for step in range(steps + 1):
        now, part = 8.0 + step * seconds, step / max(1, steps)
        if step % 25 == 0 or step == steps:
            successes = round(512 * (0.41 + 0.28 * part))
            low, high = wilson(successes, 512)
            records.evaluations.append(EvaluationRecord(step, step, now, successes, 512, low, high, 2.1))
        if step == 0:
            continue
        lags = [random.randint(0, 300), 400, 900, random.randint(200, 700), random.randint(0, 150)]
        lag_mean = sum(lag * n for lag, n in enumerate(lags)) / sum(lags)
        hints = get_type_hints(StepRecord)
        zero: dict[str, Any] = {name: [] if get_origin(hint) is list else 0 for name, hint in hints.items()}
        changes = {
            "step": step, "policy_version": step, "time_s": now, "tokens": sum(lags), "lag_histogram": lags,
            "lag_mean": lag_mean, "lag_max": 4, "lag_histogram_weighted": [count / sum(lags) for count in lags],
            "lag_in_flight_mean": 0.6 * lag_mean, "lag_in_queue_mean": 0.3 * lag_mean,
            "lag_in_learner_mean": 0.1 * lag_mean,
            "reward_mean": 0.4 + 0.3 * part + random.gauss(0, 0.04),
            "kl_reference": 0.01 * part + abs(random.gauss(0, 5e-4)), "kl_behavior_k3": 0.002 + random.gauss(0, 3e-4),
            "kl_behavior_k1": 0.002 + random.gauss(0, 1e-3), "ess_token": 0.97 + random.gauss(0, 0.006),
            "ess_sequence": 0.82 + random.gauss(0, 0.03), "entropy": 1.1 - 0.5 * part + random.gauss(0, 0.02),
            "grad_norm": 0.6 + abs(random.gauss(0, 0.1)), "tokens_generated": step * 2_400,
        }  # fmt: skip
        records.steps.append(StepRecord(**{**zero, **changes}))
        records.intervals.append(Interval("learner", "wait", now - seconds, now - 0.75 * seconds))
        records.intervals.append(Interval("learner", "train", now - 0.75 * seconds, now - 0.1 * seconds))
        records.intervals.append(Interval("learner", "stage", now - 0.1 * seconds, now))
        for actor in range(actors):
            updated = now + 0.08 * seconds
            records.intervals.append(Interval(f"actor {actor}", "update", now, updated))
            records.intervals.append(Interval(f"actor {actor}", "generate", updated, now + 0.96 * seconds))
        if step % 25 == 0:
            records.intervals.append(Interval("actor 0", "evaluate", now + 0.1, now + 2.1))
    return records


def make_run(folder: Path, records: RunRecords, **summary: Any) -> Path:
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder)
    recorder.records = records
    recorder.flush()
    (folder / "config.yaml").write_text(dump(RunConfig()))
    told: dict[str, Any] = {"status": "completed", "ledger": LEDGER, "wall_s": 171.0, "max_lag": 4.0, "seed": 0}
    write_summary(folder, summarize(records, **{**told, **summary}))
    return folder


class Page(HTMLParser):
    """The page's tags and texts, and a check that they nest."""

    VOID = frozenset({"meta", "br", "img", "link", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.alts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.alts += [value or "" for name, value in attrs if name == "aria-label"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_whole_run_has_every_picture_with_words_and_needs_nothing_else(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "sums", make_records(60))).read_text()
    page = Page(text)
    assert page.tags.count("svg") == len(page.alts) == 9
    assert all(len(alt) > 40 for alt in page.alts)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)
    assert "url(http" not in text
    assert "✓ closes" in text
    assert "samples_per_group: 8" in text
    assert "Held-out accuracy rose from" in text
    assert len(text) < 1_500_000
    assert "#01fe" not in text


@pytest.mark.parametrize(("steps", "status"), [(0, "failed"), (1, "interrupted"), (2, "failed")])
def test_short_and_broken_runs_are_reported_with_the_reason(tmp_path: Path, steps: int, status: str) -> None:
    reason = "actor 1 died: <out of memory>"
    folder = make_run(tmp_path / "run", make_records(steps), status=status, reason=reason, ledger=None)
    text = write_report(folder).read_text()
    Page(text)
    assert "actor 1 died: &lt;out of memory&gt;" in text
    assert f">{status}<" in text


def test_a_run_that_was_killed_before_it_wrote_anything(tmp_path: Path) -> None:
    text = write_report(tmp_path).read_text()
    Page(text)
    assert "There is no summary.json" in text
    assert "no config.yaml" in text


def test_a_killed_run_takes_the_bound_from_its_configuration(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", make_records(3))
    (folder / "summary.json").unlink()
    assert "max_lag 4" in write_report(folder).read_text()


def test_missing_evaluations_and_values_that_are_no_numbers(tmp_path: Path) -> None:
    records = make_records(4)
    records.evaluations.clear()
    broken = [
        dataclasses.replace(
            step,
            kl_reference=math.nan,
            grad_norm=math.inf,
            reward_mean=math.nan,
            lag_histogram=[],
            lag_histogram_weighted=[],
        )
        for step in records.steps
    ]
    folder = make_run(tmp_path / "run", RunRecords(broken, [], []), max_lag=math.inf)
    text = write_report(folder).read_text()
    Page(text)
    assert "says nothing about accuracy" in text
    assert "unbounded" in text


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    records = make_records(2)
    records.intervals.append(Interval("actor $x_{<script>--", "generate", 0.0, 1.0))
    folder = make_run(tmp_path / "run", records)
    (folder / "config.yaml").write_text("</pre><script>alert(1)</script>")
    text = write_report(folder).read_text()
    assert "script" not in Page(text).tags


def test_a_ledger_that_does_not_close_is_not_hidden(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", make_records(2), ledger=dataclasses.replace(LEDGER, trained=3_839))
    assert "does not close: groups unaccounted for: 1" in write_report(folder).read_text()


def test_damaged_summary_and_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run folder"):
        write_report(tmp_path / "none")
    for text in ("{", "[]", '{"status": "completed"}'):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ConfigError, match=r"summary\.json"):
            write_report(tmp_path)


@pytest.mark.parametrize(
    "key",
    ["status", "heldout_before", "heldout_after.low", "ledger.dropped", "lag.p95", "busy", "busy.actors", "wall_s",
     "max_lag", "seed", "reward_failures"],
)  # fmt: skip
def test_summary_that_lacks_a_value_or_holds_another_thing(tmp_path: Path, key: str) -> None:
    path = make_run(tmp_path / "run", make_records(30)) / "summary.json"
    *sections, leaf = key.split(".")
    for wrong in ([1], {"a": [1]}, "1", math.nan, ...):
        summary = json.loads(path.read_text())
        section = summary
        for name in sections:
            section = section[name]
        kept = section.pop(leaf) if wrong is ... else section[leaf]
        if wrong is not ...:
            section[leaf] = wrong
        if wrong == "1" and key == "status":
            continue
        before = path.read_text()
        path.write_text(json.dumps(summary))
        with pytest.raises(ConfigError, match=rf"summary\.json cannot be read \({key}.*delete it") as caught:
            write_report(path.parent)
        assert "\n" not in str(caught.value) and kept is not ...
        path.write_text(before)


def test_page_that_cannot_be_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", make_records(0))
    (folder / "report.html").mkdir()
    with pytest.raises(OutputError, match=r"report\.html cannot be written \(Is a directory\): see that"):
        write_report(folder)


def test_reason_that_is_no_text(tmp_path: Path) -> None:
    assert ">é?</p>" in write_report(make_run(tmp_path / "run", make_records(0), reason="é\udcff")).read_text()


def summary_of(before: tuple[int, int] | None, after: tuple[int, int] | None) -> dict[str, Any]:
    def heldout(pair: tuple[int, int] | None) -> dict[str, Any] | None:
        if pair is None:
            return None
        low, high = wilson(*pair)
        return {"successes": pair[0], "n": pair[1], "rate": pair[0] / pair[1], "low": low, "high": high}

    return {"heldout_before": heldout(before), "heldout_after": heldout(after)}


def test_headlines_claim_what_the_intervals_show() -> None:
    assert headline(summary_of((211, 512), (353, 512))) == (
        "Held-out accuracy rose from 41.2 % [37.0, 45.5] to 68.9 % [64.8, 72.8]; the intervals do not overlap."
    )
    assert "fell from" in headline(summary_of((353, 512), (211, 512)))
    assert "higher, but the intervals overlap" in headline(summary_of((211, 512), (220, 512)))
    assert "lower, but the intervals overlap" in headline(summary_of((220, 512), (211, 512)))
    assert "did not change" in headline(summary_of((220, 512), (220, 512)))
    assert "not measured again" in headline(summary_of((220, 512), None))


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_headline_says_rose_only_when_the_intervals_are_apart(before: int, after: int) -> None:
    summary = summary_of((before, 200), (after, 200))
    apart = summary["heldout_after"]["low"] > summary["heldout_before"]["high"]
    assert ("rose" in headline(summary)) == apart


def test_weighted_lag_of_a_run_counts_steps_without_weight() -> None:
    histograms: list[list[float]] = [[1.0], [], [0.25, 0.5, 0.25]]
    steps = [
        dataclasses.replace(step, lag_histogram_weighted=shares)
        for step, shares in zip(make_records(3).steps, histograms, strict=True)
    ]
    assert weighted_lag_shares(steps) == [0.625, 0.25, 0.125]
    assert weighted_lag_shares(steps[1:2]) == []


@given(st.lists(st.floats(-10, 10), min_size=1), st.integers(1, 5))
def test_moving_average_stays_within_the_values(values: list[float], window: int) -> None:
    averaged = moving_average(values, window)
    assert len(averaged) == len(values)
    assert all(min(values) - 1e-9 <= mean <= max(values) + 1e-9 for mean in averaged)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 2))), st.floats(0.001, 1))
def test_coalesced_stretches_cover_the_old_ones_and_are_apart(pairs: list[tuple[float, float]], gap: float) -> None:
    stretches = [(start, start + length) for start, length in pairs]
    joined = coalesce(stretches, gap)
    assert all(any(low <= start and end <= high for low, high in joined) for start, end in stretches)
    assert all(later[0] - earlier[1] > gap for earlier, later in itertools.pairwise(joined))


def test_lengths_are_shown_where_all_were_trained_or_hidden_where_not(tmp_path: Path) -> None:
    records, starved = make_records(2), {"offered_tokens": [0, 0, 6, 2], "trained_tokens": [0.0, 0.0, 6.0, 0.0]}
    assert "Lengths of prompts" not in write_report(make_run(tmp_path / "even", records)).read_text()
    steps = [dataclasses.replace(step, **starved, stale_tokens=[0, 0, 0, 2]) for step in records.steps]
    page = write_report(make_run(tmp_path / "starved", dataclasses.replace(records, steps=steps))).read_text()
    # Of the offered, 3/4 are in the shorter bucket, of the trained all.
    assert "Kolmogorov-Smirnov distance 0.25; 25.0\u00a0%" in page or "distance 0.25; 25.0 %" in page
