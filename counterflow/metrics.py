"""Prometheus metrics of a run: the latest records, served over HTTP from a registry of their own.

In: step, evaluation and ledger records. Out: text for a scraper; each scrape sees whole records, never half a step.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from counterflow.configs.run import MetricsSection
from counterflow.errors import ConfigError
from counterflow.families import (
    BY_LENGTH,
    Totals,
    counters,
    evaluation_gauges,
    gauge,
    lag_histogram,
    ledger_gauges,
    lengths,
    step_gauges,
    weight_sync,
)
from counterflow.lengths import added
from counterflow.records import EvaluationRecord, Ledger, StepRecord
from counterflow.weight_sync.canary import Gap

__all__ = ["Metrics"]


class _Server(Protocol):
    server_port: int

    def shutdown(self) -> None: ...
    def server_close(self) -> None: ...


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
        self._totals = Totals()
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
            totals.skipped_updates += record.skipped_updates
            totals.busy_s += record.train_s
            totals.wait_s += record.wait_s
            pairs = itertools.zip_longest(totals.lag_counts, record.lag_histogram, fillvalue=0)
            totals.lag_counts = [old + new for old, new in pairs]
            for name in BY_LENGTH:
                totals.by_length[name] = added(totals.by_length.get(name, []), getattr(record, name))

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
        yield from counters(self._totals)
        yield lag_histogram(self._totals.lag_counts)
        yield from lengths(self._totals.by_length)
        if self._max_lag is not None:
            yield gauge("max_lag", "Configured bound of the lag, in versions.", self._max_lag)
        if self._step is not None:
            yield from step_gauges(self._step)
        if self._evaluation is not None:
            yield from evaluation_gauges(self._evaluation)
        if self._ledger is not None:
            yield from ledger_gauges(self._ledger)
        yield from weight_sync(self._gaps, *self._delivery)
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
