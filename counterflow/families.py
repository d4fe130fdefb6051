"""Metric families: records of a run as Prometheus names, labels and help. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from counterflow.lengths import distance, longest
from counterflow.records import EvaluationRecord, Ledger, StepRecord
from counterflow.weight_sync.canary import Gap

LAG_BUCKETS = (*range(17), 32, 64)
BY_LENGTH = ("offered_tokens", "trained_tokens", "stale_groups", "stale_samples", "stale_tokens")


@dataclass
class Totals:
    """What a counter has counted since the run began."""

    steps: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    failed_samples: int = 0
    skipped_updates: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    lag_counts: list[int] = field(default_factory=list)
    by_length: dict[str, list[float]] = field(default_factory=dict)
    """Of the records' counts by prompt length, by their names, those of `BY_LENGTH`."""


def counters(totals: Totals) -> Iterator[Metric]:
    """What counters have counted since the run began."""
    yield _counter("steps", "Optimizer steps taken.", totals.steps)
    tokens = CounterMetricFamily(
        "counterflow_tokens", "Response tokens, made by actors, trained by learner.", labels=["side"]
    )
    tokens.add_metric(["actors"], totals.tokens_generated)
    tokens.add_metric(["learner"], totals.tokens_trained)
    yield tokens
    yield _counter("failed_samples", "Samples without a reward: failed or past their deadline.", totals.failed_samples)
    yield _counter(
        "skipped_updates", "Steps that left the weights as they were: no finite gradient.", totals.skipped_updates
    )
    yield _counter("learner_busy_seconds", "Seconds the learner trained.", totals.busy_s)
    yield _counter("learner_wait_seconds", "Seconds the learner waited for groups.", totals.wait_s)


def lengths(by_length: Mapping[str, list[float]]) -> Iterator[Metric]:
    """What was offered, trained and touched as stale, by length of the prompt: `by_length` as in `Totals`."""
    stale = CounterMetricFamily(
        "counterflow_stale",
        "What admission.staleness dropped, masked or weighed down, by the longest prompt of its bucket, in tokens.",
        labels=["unit", "prompt_tokens"],
    )
    passed = CounterMetricFamily(
        "counterflow_prompt_length_tokens",
        "Response tokens offered to the learner, and trained by their share, by the longest prompt of their bucket.",
        labels=["side", "prompt_tokens"],
    )
    for name in BY_LENGTH:
        family = stale if name.startswith("stale_") else passed
        kind = name.removeprefix("stale_") if family is stale else name.removesuffix("_tokens")
        for index, value in enumerate(by_length.get(name, ())):
            family.add_metric([kind, str(longest(index))], value)
    yield stale
    yield passed
    offered, trained = (by_length.get(name, []) for name in BY_LENGTH[:2])
    yield gauge(
        "prompt_length_distance",
        "Kolmogorov-Smirnov distance of the lengths of trained prompts from those offered, since the run began.",
        distance(offered, trained),
    )


def lag_histogram(counts: list[int]) -> Metric:
    """Lags of all trained tokens: `counts[i]` of lag i."""
    buckets = [(str(float(bound)), float(sum(counts[: bound + 1]))) for bound in LAG_BUCKETS]
    buckets.append(("+Inf", float(sum(counts))))
    total = sum(lag * count for lag, count in enumerate(counts))
    return HistogramMetricFamily(
        "counterflow_token_lag", "Lag of trained tokens, in versions.", buckets=buckets, sum_value=float(total)
    )


def step_gauges(step: StepRecord) -> Iterator[Metric]:
    """The latest step."""
    yield gauge("policy_version", "Optimizer steps behind the learner's weights.", step.policy_version)
    yield gauge("publish_debt", "Versions made that the actors do not serve yet.", step.publish_debt)
    yield gauge("step_lag_max", "Largest token lag of the last step, in versions.", step.lag_max)
    parts = GaugeMetricFamily(
        "counterflow_step_lag_mean", "Parts of the mean token lag of the last step, in versions.", labels=["part"]
    )
    for part in ("in_flight", "in_queue", "in_learner"):
        parts.add_metric([part], getattr(step, f"lag_{part}_mean"))
    yield parts
    by_weight = "Mean lag of the last step, each token counted by its weight in the loss, in versions."
    weighted = sum(lag * share for lag, share in enumerate(step.lag_histogram_weighted))
    yield gauge("step_lag_weighted_mean", by_weight, weighted)
    yield gauge(
        "step_cache_age_mean", "Mean age of the caches that tokens attended to, in versions.", step.cache_age_mean
    )
    yield gauge("reward", "Mean task reward of the last step.", step.reward_mean)
    yield gauge("kl_reference_nats", "KL(pi || ref) a token by k3.", step.kl_reference)
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
    yield gauge("chi2", "E[rho^2] - 1 over tokens.", step.chi2)
    yield gauge(
        "truncated_weights_ratio",
        "Share of tokens whose importance weight was capped, clipped or masked.",
        step.truncated_weights,
    )
    yield gauge("entropy_nats", "Mean token entropy of the policy.", step.entropy)
    yield gauge("grad_norm", "Gradient norm before clipping.", step.grad_norm)
    yield gauge("learning_rate", "Learning rate of the last step.", step.learning_rate)
    yield gauge("zero_signal_groups_ratio", "Share of groups whose rewards are all equal.", step.zero_signal_groups)
    yield gauge("truncated_responses_ratio", "Share of responses cut at max_tokens.", step.truncated_responses)
    yield gauge("buffer_groups", "Groups in the buffer.", step.buffer_groups)


def evaluation_gauges(record: EvaluationRecord) -> Iterator[Metric]:
    """The latest evaluation."""
    yield gauge("heldout_accuracy_ratio", "Success rate on the held-out set, greedy.", record.rate)
    yield gauge("heldout_accuracy_low_ratio", "Lower end of its 95 % Wilson interval.", record.low)
    yield gauge("heldout_accuracy_high_ratio", "Upper end of its 95 % Wilson interval.", record.high)
    yield gauge("heldout_policy_version", "Version that was evaluated.", record.policy_version)


def ledger_gauges(ledger: Ledger) -> Iterator[Metric]:
    """Where every group is."""
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
    yield gauge("buffer_bytes", "Size of the groups in the buffer.", ledger.bytes_buffered)
    yield _counter("leases_reissued", "Leases that ran out and were given out again.", ledger.reissued)
    yield _counter("groups_regenerated", "Groups that a restarted server had lost.", ledger.regenerated)
    yield _counter("stranger_entries", "Entries that no actor of this run had added.", ledger.strangers)
    yield gauge("ledger_closes", "1 when generated = trained + buffered + in flight + dropped.", float(ledger.closes))


def weight_sync(gaps: Mapping[int, Gap], skipped: int, repeated: int, replaced: int) -> Iterator[Metric]:
    """Gaps by actor, and what delivery had to skip, to repeat and to do without."""
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


def gauge(name: str, doc: str, value: float) -> Metric:
    """One number."""
    return GaugeMetricFamily(f"counterflow_{name}", doc, value=value)


def _counter(name: str, doc: str, value: float) -> Metric:
    return CounterMetricFamily(f"counterflow_{name}", doc, value=value)
