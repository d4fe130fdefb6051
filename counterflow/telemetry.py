"""All that a run tells about itself: records on disk, log lines, Prometheus metrics and the live view, from one place.

Steps, evaluations, ledgers and actor states flow in from the supervisor; nothing flows back.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from counterflow.actors.rollout import ActorState
from counterflow.configs.schema import RunConfig
from counterflow.display import Display
from counterflow.errors import first_line
from counterflow.events import EventLog
from counterflow.metrics import Metrics
from counterflow.recorder import Recorder, Status, summarize, write_summary
from counterflow.records import EvaluationRecord, Interval, Ledger, StepRecord
from counterflow.report import write_report
from counterflow.weight_sync.canary import Gap


class Telemetry:
    """The voices of one run."""

    def __init__(self, config: RunConfig, folder: Path, metrics: Metrics, display: Display) -> None:
        self._config, self._folder = config, folder
        self._metrics, self._display = metrics, display
        self._recorder, self._events = Recorder(folder), EventLog(folder)
        self._reward_failures: Counter[str] = Counter()
        self._failures_by: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._failures_before: Counter[str] = Counter()
        self._ledger: Ledger | None = None
        self._was_full = False
        self._remarked: set[str] = set()
        records = self._recorder.records
        times_s = [step.time_s for step in records.steps] + [evaluation.time_s for evaluation in records.evaluations]
        self.started_at = time.time() - max(times_s, default=0.0)
        """Unix time, the zero of all times reported; a resumed run's goes on where its records end."""
        self._generating_from_s = 0.0
        self.last_error: str | None = None
        """Why the last group failed that did."""

    def now(self) -> float:
        """Seconds since the run's start."""
        return time.time() - self.started_at

    @property
    def steps(self) -> int:
        """Optimizer steps told of so far."""
        return len(self._recorder.records.steps)

    @property
    def evaluated(self) -> set[int]:
        """The versions whose evaluation was told of."""
        return {evaluation.policy_version for evaluation in self._recorder.records.evaluations}

    def note(self, text: str) -> None:
        """A line for the user."""
        self._display.note(text)

    def event(self, event: str, **fields: object) -> None:
        """A line for the log."""
        self._events.write(event, **fields)

    def generating(self) -> None:
        """The actors begin: what their engines took to start is no step's time."""
        self._generating_from_s = self.now()

    def intervals(self, intervals: Iterable[Interval]) -> None:
        """What processes did and when."""
        self._recorder.add_intervals(intervals)

    def step(self, record: StepRecord, *, served: int, skipped: int) -> None:
        """An optimizer step, with the version that the actors serve and how many versions were overtaken so far."""
        records = self._recorder.records
        before = records.steps[-1] if records.steps else None
        elapsed = record.time_s - max(self._generating_from_s, before.time_s if before else 0.0)
        generated = record.tokens_generated - (before.tokens_generated if before else 0)
        record = replace(
            record,
            actors_tokens_per_s=generated / elapsed if elapsed > 0 else 0.0,
            publish_debt=record.policy_version - served,
        )
        self._recorder.add_step(record)
        self._metrics.observe_step(record)
        self._display.step(record, evaluation=records.evaluations[-1] if records.evaluations else None)
        self.event(
            "step_committed",
            step=record.step,
            policy_version=record.policy_version,
            groups=record.groups,
            tokens=record.tokens,
            lag_max=record.lag_max,
            versions_skipped=skipped,
        )

    def again(self, record: StepRecord, *, served: int) -> None:
        """A step that was taken again; it is told of where the one who took it first had no time to."""
        steps = self._recorder.records.steps
        if not steps or record.step > steps[-1].step:
            self.step(record, served=served, skipped=0)

    def remarks(self, texts: Iterable[str]) -> None:
        """What the learner says of its steps: all of it for the log, each kind once for the user."""
        for text in texts:
            self.event("remark", text=text)
            kind = re.sub(r"[\d.,]+", "#", text)
            if kind not in self._remarked:
                self._remarked.add(kind)
                self.note(text)

    def evaluation(self, record: EvaluationRecord, *, failed: int) -> None:
        """An evaluation, with how many of its samples got no reward."""
        self._recorder.add_evaluation(record)
        self._metrics.observe_evaluation(record)
        self.event(
            "evaluated", policy_version=record.policy_version, successes=record.successes, n=record.n, failed=failed
        )
        self.note(
            f"held-out at version {record.policy_version}: {record.successes}/{record.n} = {record.rate:.3f} "
            f"[{record.low:.3f}, {record.high:.3f}]" + (f", {failed} without a reward" if failed else "")
        )

    def canary(self, actor: int, version: int, gap: Gap) -> None:
        """How far an engine's log-probs are from the learner's at the same version."""
        self._metrics.observe_canary(actor, gap)
        self.event("canary", actor=actor, policy_version=version, **asdict(gap))

    def retried(self, actor: str, error: Exception) -> None:
        """A version that an actor failed to load, and is sent again."""
        self.event("version_retried", receiver=actor, error=first_line(error))
        self.note(f"{actor} is sent a version again ({first_line(error)})")

    def delivery(self, skipped: int, repeated: int, replaced: int) -> None:
        """What weight sync had to skip, to load again, and which actors it had to do without, so far."""
        self._metrics.observe_delivery(skipped, repeated, replaced)

    def actors(self, states: Sequence[tuple[int, ActorState]]) -> None:
        """How every actor that lives is doing."""
        for index, state in states:
            failures = Counter(state.reward_failures)
            if self._failures_by[index] - failures:
                # It was replaced: what its predecessor counted stays counted.
                self._failures_before += self._failures_by[index]
            self._failures_by[index] = failures
            self.intervals(state.intervals)
            if state.last_error is not None:
                self.last_error = state.last_error
                self.event("group_failed", actor=index, error=state.last_error)
                self.note(f"actor {index}: {state.last_error}")
        self._reward_failures = sum(self._failures_by.values(), self._failures_before)
        self._metrics.observe_reward_failures(self._reward_failures)
        closed = Counter(state.admission_closed for _, state in states if state.admission_closed)
        self._metrics.observe_admission(closed)
        if closed["full"] and not self._was_full:
            self.note(
                "the buffer is full, admission pauses until the learner has caught up (buffer.capacity_groups, "
                "buffer.capacity_bytes)"
            )
        self._was_full = bool(closed["full"])

    def ledger(self, ledger: Ledger) -> None:
        """Where every group is."""
        self._ledger = ledger
        self._metrics.observe_ledger(ledger)

    def flush(self) -> None:
        """Bring the records to disk."""
        self._recorder.flush()

    def finish(self, status: Status, reason: str | None) -> Path:
        """Write summary and report, however the run ended; returns the report's path."""
        self.event("run_ended", status=status, reason=reason)
        self.flush()
        summary = summarize(
            self._recorder.records,
            status=status,
            ledger=self._ledger,
            wall_s=self.now(),
            max_lag=self._config.admission.max_lag,
            seed=self._config.run.seed,
            reason=reason,
            reward_failures=self._reward_failures,
        )
        write_summary(self._folder, summary)
        return write_report(self._folder)
