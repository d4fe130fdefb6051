"""Prometheus metrics of a run: the latest records, served over HTTP from a registry of their own.

In: step, evaluation and ledger records. Out: text for a scraper; each scrape sees whole records, never half a step.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from counterflow.configs.schema import MetricsSection
from counterflow.errors import ConfigError
from counterflow.records import EvaluationRecord, Ledger, StepRecord
from counterflow.weight_sync.canary import Gap

__all__ = ["Metrics"]

LAG_BUCKETS = (*range(17), 32, 64)


class _Server(Protocol):
    server_port: int

    def shutdown(self) -> None: ...
    def server_close(self) -> None: ...


@dataclass
class _Totals:
    """What a counter has counted since the run began."""

    steps: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    failed_samples: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    lag_counts: list[int] = field(default_factory=list)


class Metrics:
    """Serves a run's metrics until `close`; binds at construction.

    Args:
        config: where to bind.
        max_lag: the configured bound, served beside the lag that it bounds.

    Raises:
        ConfigError: the address is taken or cannot be bound.
    """

    def __init__(self, config: MetricsSection, *, max_lag: float | None = None) -> None:
        registry = CollectorRegistry(auto_describe=False)
        self._collector = _RunCollector(max_lag)
        registry.register(self._collector)
        self._server: _Server
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"metrics.port={config.port} on metrics.host={config.host} cannot be bound ({reason}): "
                "free it, give another metrics.port, or 0 to take a free one"
            ) from None
        self.port: int = self._server.server_port
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self.port}/metrics"

    def observe_step(self, record: StepRecord) -> None:
        """Take over one optimizer step."""
        self._collector.observe_step(record)

    def observe_evaluation(self, record: EvaluationRecord) -> None:
        """Take over one evaluation."""
        self._collector.observe_evaluation(record)

    def observe_canary(self, actor: int, gap: Gap) -> None:
        """Take over how far an engine's log-probs are from the learner's at the same version."""
        self._collector.observe_canary(actor, gap)

    def observe_delivery(self, skipped: int, repeated: int, replaced: int) -> None:
        """Take over what weight sync had to skip, to load again, and which actors it had to do without, so far."""
        self._collector.observe_delivery(skipped, repeated, replaced)

    def observe_ledger(self, ledger: Ledger) -> None:
        """Take over where every group is."""
        self._collector.observe_ledger(ledger)

    def observe_reward_failures(self, failures: Mapping[str, int]) -> None:
        """Take over how many samples got no reward so far, by reason."""
        self._collector.observe_reward_failures(failures)

    def observe_admission(self, closed: Counter[str]) -> None:
        """Take over how many actors may start no more groups now, by reason."""
        self._collector.observe_admission(closed)

    def close(self) -> None:
        """Stop serving and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _RunCollector(Collector):
    def __init__(self, max_lag: float | None) -> None:
        self._lock = threading.Lock()
        self._max_lag = max_lag
        self._totals = _Totals()
        self._step: StepRecord | None = None
        self._evaluation: EvaluationRecord | None = None
        self._ledger: Ledger | None = None
        self._reward_failures: dict[str, int] = {}
        self._closed: Counter[str] = Counter()
        self._gaps: dict[int, Gap] = {}
        self._delivery: tuple[int, ...] = (0, 0, 0)

    def observe_step(self, record: StepRecord) -> None:
        with self._lock:
            self._step, totals = record, self._totals
            totals.steps += 1
            totals.tokens_generated = max(totals.tokens_generated, record.tokens_generated)
            totals.tokens_trained += record.tokens
            totals.failed_samples += record.failed_samples
            totals.busy_s += record.train_s
            totals.wait_s += record.wait_s
            pairs = itertools.zip_longest(totals.lag_counts, record.lag_histogram, fillvalue=0)
            totals.lag_counts = [old + new for old, new in pairs]

    def observe_evaluation(self, record: EvaluationRecord) -> None:
        with self._lock:
            self._evaluation = record

    def observe_canary(self, actor: int, gap: Gap) -> None:
        with self._lock:
            self._gaps[actor] = gap

    def observe_delivery(self, *counts: int) -> None:
        with self._lock:
            self._delivery = counts

    def observe_ledger(self, ledger: Ledger) -> None:
        with self._lock:
            self._ledger = ledger

    def observe_reward_failures(self, failures: Mapping[str, int]) -> None:
        with self._lock:
            self._reward_failures = dict(failures)

    def observe_admission(self, closed: Counter[str]) -> None:
        with self._lock:
            self._closed = closed

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            yield from list(self._families())

    def _families(self) -> Iterator[Metric]:
        yield from _counters(self._totals)
        yield _lag_histogram(self._totals.lag_counts)
        if self._max_lag is not None:
            yield _gauge("max_lag", "Configured bound of the lag, in versions.", self._max_lag)
        if self._step is not None:
            yield from _step_gauges(self._step)
        if self._evaluation is not None:
            yield from _evaluation_gauges(self._evaluation)
        if self._ledger is not None:
            yield from _ledger_gauges(self._ledger)
        yield from _weight_sync(self._gaps, *self._delivery)
        closed = GaugeMetricFamily(
            "counterflow_admission_closed_actors", "Actors that may start no more groups now.", labels=["reason"]
        )
        for reason in ("lag_budget", "full"):
            closed.add_metric([reason], self._closed[reason])
        yield closed
        failures = CounterMetricFamily(
            "counterflow_reward_failures", "Samples without a reward, evaluations included.", labels=["reason"]
        )
        for reason, count in self._reward_failures.items():
            failures.add_metric([reason], count)
        yield failures


def _counters(totals: _Totals) -> Iterator[Metric]:
    yield _counter("steps", "Optimizer steps taken.", totals.steps)
    tokens = CounterMetricFamily(
        "counterflow_tokens", "Response tokens, made by actors, trained by learner.", labels=["side"]
    )
    tokens.add_metric(["actors"], totals.tokens_generated)
    tokens.add_metric(["learner"], totals.tokens_trained)
    yield tokens
    yield _counter("failed_samples", "Samples without a reward: failed or past their deadline.", totals.failed_samples)
    yield _counter("learner_busy_seconds", "Seconds the learner trained.", totals.busy_s)
    yield _counter("learner_wait_seconds", "Seconds the learner waited for groups.", totals.wait_s)


def _lag_histogram(counts: list[int]) -> Metric:
    buckets = [(str(float(bound)), float(sum(counts[: bound + 1]))) for bound in LAG_BUCKETS]
    buckets.append(("+Inf", float(sum(counts))))
    total = sum(lag * count for lag, count in enumerate(counts))
    return HistogramMetricFamily(
        "counterflow_token_lag", "Lag of trained tokens, in versions.", buckets=buckets, sum_value=float(total)
    )


def _step_gauges(step: StepRecord) -> Iterator[Metric]:
    yield _gauge("policy_version", "Optimizer steps behind the learner's weights.", step.policy_version)
    yield _gauge("publish_debt", "Versions made that the actors do not serve yet.", step.publish_debt)
    yield _gauge("step_lag_max", "Largest token lag of the last step, in versions.", step.lag_max)
    parts = GaugeMetricFamily(
        "counterflow_step_lag_mean", "Parts of the mean token lag of the last step, in versions.", labels=["part"]
    )
    for part in ("in_flight", "in_queue", "in_learner"):
        parts.add_metric([part], getattr(step, f"lag_{part}_mean"))
    yield parts
    by_weight = "Mean lag of the last step, each token counted by its weight in the loss, in versions."
    weighted = sum(lag * share for lag, share in enumerate(step.lag_histogram_weighted))
    yield _gauge("step_lag_weighted_mean", by_weight, weighted)
    yield _gauge(
        "step_cache_age_mean", "Mean age of the caches that tokens attended to, in versions.", step.cache_age_mean
    )
    yield _gauge("reward", "Mean task reward of the last step.", step.reward_mean)
    yield _gauge("kl_reference_nats", "KL(pi || ref) a token by k3.", step.kl_reference)
    kl = GaugeMetricFamily("counterflow_kl_behavior_nats", "KL(mu || pi) a token.", labels=["estimator"])
    kl.add_metric(["k1"], step.kl_behavior_k1)
    kl.add_metric(["k3"], step.kl_behavior_k3)
    yield kl
    ess = GaugeMetricFamily(
        "counterflow_ess_ratio", "Effective sample size of the importance ratios over N.", labels=["level"]
    )
    ess.add_metric(["token"], step.ess_token)
    ess.add_metric(["sequence"], step.ess_sequence)
    yield ess
    yield _gauge("chi2", "E[rho^2] - 1 over tokens.", step.chi2)
    yield _gauge(
        "truncated_weights_ratio",
        "Share of tokens whose importance weight was capped, clipped or masked.",
        step.truncated_weights,
    )
    yield _gauge("entropy_nats", "Mean token entropy of the policy.", step.entropy)
    yield _gauge("grad_norm", "Gradient norm before clipping.", step.grad_norm)
    yield _gauge("learning_rate", "Learning rate of the last step.", step.learning_rate)
    yield _gauge("zero_signal_groups_ratio", "Share of groups whose rewards are all equal.", step.zero_signal_groups)
    yield _gauge("truncated_responses_ratio", "Share of responses cut at max_tokens.", step.truncated_responses)
    yield _gauge("buffer_groups", "Groups in the buffer.", step.buffer_groups)


def _evaluation_gauges(record: EvaluationRecord) -> Iterator[Metric]:
    yield _gauge("heldout_accuracy_ratio", "Success rate on the held-out set, greedy.", record.rate)
    yield _gauge("heldout_accuracy_low_ratio", "Lower end of its 95 % Wilson interval.", record.low)
    yield _gauge("heldout_accuracy_high_ratio", "Upper end of its 95 % Wilson interval.", record.high)
    yield _gauge("heldout_policy_version", "Version that was evaluated.", record.policy_version)


def _ledger_gauges(ledger: Ledger) -> Iterator[Metric]:
    groups = GaugeMetricFamily("counterflow_ledger_groups", "Groups by where they are.", labels=["state", "reason"])
    for state in ("generated", "trained", "buffered", "in_flight"):
        groups.add_metric([state, ""], getattr(ledger, state))
    for reason, count in ledger.dropped.items():
        groups.add_metric(["dropped", reason], count)
    yield groups
    tokens = GaugeMetricFamily("counterflow_ledger_tokens", "Tokens by where they are.", labels=["state", "reason"])
    for state in ("generated", "trained", "buffered"):
        tokens.add_metric([state, ""], getattr(ledger, f"tokens_{state}"))
    for reason, count in ledger.tokens_dropped.items():
        tokens.add_metric(["dropped", reason], count)
    yield tokens
    yield _gauge("buffer_bytes", "Size of the groups in the buffer.", ledger.bytes_buffered)
    yield _counter("leases_reissued", "Leases that ran out and were given out again.", ledger.reissued)
    yield _counter("groups_regenerated", "Groups that a restarted server had lost.", ledger.regenerated)
    yield _counter("stranger_entries", "Entries that no actor of this run had added.", ledger.strangers)
    yield _gauge("ledger_closes", "1 when generated = trained + buffered + in flight + dropped.", float(ledger.closes))


def _weight_sync(gaps: Mapping[int, Gap], skipped: int, repeated: int, replaced: int) -> Iterator[Metric]:
    floor = GaugeMetricFamily(
        "counterflow_engine_gap_nats",
        "Difference a token of an engine's and the learner's log-probs at the same version.",
        labels=["actor", "statistic"],
    )
    for actor, gap in gaps.items():
        floor.add_metric([str(actor), "mean"], gap.mean)
        floor.add_metric([str(actor), "max"], gap.largest)
    yield floor
    yield _counter("versions_skipped", "Versions that were overtaken before they were sent.", skipped)
    yield _counter("weight_loads_repeated", "Loads of a version that failed and were tried again.", repeated)
    yield _counter("actors_replaced", "Actors that died, or got no weights, and were replaced.", replaced)


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(f"counterflow_{name}", doc, value=value)


def _counter(name: str, doc: str, value: float) -> Metric:
    return CounterMetricFamily(f"counterflow_{name}", doc, value=value)
