"""What may go wrong with metrics: a taken port, a port that is not given back, a histogram that does not add up."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from step_records import make_step

from counterflow.configs.run import MetricsSection
from counterflow.errors import ConfigError
from counterflow.metrics import Metrics
from counterflow.records import EvaluationRecord, Ledger


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    served = Metrics(MetricsSection(), max_lag=4)
    yield served
    served.close()


def scrape(metrics: Metrics) -> dict[str, float]:
    with urllib.request.urlopen(metrics.url, timeout=5) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("counterflow_")
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_a_scrape_before_the_first_step_works(metrics: Metrics) -> None:
    samples = scrape(metrics)
    assert samples["counterflow_steps_total"] == 0
    assert samples["counterflow_token_lag_count"] == 0
    assert samples["counterflow_max_lag"] == 4
    assert metrics.url.startswith("http://127.0.0.1:")


def test_counters_sum_over_steps_and_gauges_hold_the_last(metrics: Metrics) -> None:
    metrics.observe_step(make_step(policy_version=1, tokens=10, tokens_generated=30, train_s=1.5, wait_s=0.5))
    metrics.observe_step(make_step(policy_version=2, tokens=20, tokens_generated=70, train_s=1.0, ess_token=0.9))
    samples = scrape(metrics)
    assert samples["counterflow_steps_total"] == 2
    assert samples["counterflow_policy_version"] == 2
    assert samples["counterflow_tokens_total{side=actors}"] == 70
    assert samples["counterflow_tokens_total{side=learner}"] == 30
    assert samples["counterflow_learner_busy_seconds_total"] == 2.5
    assert samples["counterflow_learner_wait_seconds_total"] == 0.5
    assert samples["counterflow_ess_ratio{level=token}"] == 0.9


def test_lag_histogram_is_cumulative_and_counts_every_token(metrics: Metrics) -> None:
    metrics.observe_step(make_step(lag_histogram=[3, 2]))
    metrics.observe_step(make_step(lag_histogram=[0] * 40 + [7]))
    samples = scrape(metrics)
    assert samples["counterflow_token_lag_bucket{le=0.0}"] == 3
    assert samples["counterflow_token_lag_bucket{le=1.0}"] == 5
    assert samples["counterflow_token_lag_bucket{le=32.0}"] == 5
    assert samples["counterflow_token_lag_bucket{le=64.0}"] == 12
    assert samples["counterflow_token_lag_bucket{le=+Inf}"] == samples["counterflow_token_lag_count"] == 12
    assert samples["counterflow_token_lag_sum"] == 2 + 40 * 7


def test_parts_of_the_lag_are_served_as_means_of_other_parts(metrics: Metrics) -> None:
    parts = {"lag_in_flight_mean": 1.5, "lag_in_queue_mean": 0.25, "lag_in_learner_mean": 1.0}
    metrics.observe_step(make_step(**parts, cache_age_mean=0.75, lag_histogram_weighted=[0.5, 0.25, 0.25]))
    samples = scrape(metrics)
    assert samples["counterflow_step_lag_mean{part=in_flight}"] == 1.5
    assert samples["counterflow_step_lag_mean{part=in_queue}"] == 0.25
    assert samples["counterflow_step_lag_mean{part=in_learner}"] == 1.0
    assert samples["counterflow_step_lag_weighted_mean"] == 0.75
    assert samples["counterflow_step_cache_age_mean"] == 0.75


def test_ledger_and_evaluation_are_served(metrics: Metrics) -> None:
    metrics.observe_ledger(Ledger(10, 6, 1, 1, {"stale": 2}, 100, 60, 10, {"stale": 30}))
    metrics.observe_evaluation(EvaluationRecord(3, 3, 1.0, 40, 100, 0.3, 0.5, 0.1))
    samples = scrape(metrics)
    assert samples["counterflow_ledger_groups{reason=stale,state=dropped}"] == 2
    assert samples["counterflow_ledger_groups{reason=,state=in_flight}"] == 1
    assert samples["counterflow_ledger_closes"] == 1
    assert samples["counterflow_heldout_accuracy_ratio"] == 0.4


def test_values_that_are_no_numbers_do_not_break_a_scrape(metrics: Metrics) -> None:
    metrics.observe_step(make_step(entropy=float("nan"), grad_norm=float("inf")))
    assert scrape(metrics)["counterflow_grad_norm"] == float("inf")


def test_a_taken_port_is_a_config_error_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.port={port}") as caught:
            Metrics(MetricsSection(port=port))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"metrics\.host=no\.such\.host\.invalid"):
        Metrics(MetricsSection(host="no.such.host.invalid"))


def test_close_gives_the_port_back_and_runs_share_nothing() -> None:
    first = Metrics(MetricsSection())
    first.observe_step(make_step(policy_version=9))
    port = first.port
    first.close()
    second = Metrics(MetricsSection(port=port))
    assert "counterflow_policy_version" not in scrape(second)
    second.close()


def test_lengths_of_a_step_are_lost_or_counted_as_others(metrics: Metrics) -> None:
    metrics.observe_step(make_step(offered_tokens=[0, 6], trained_tokens=[0.0, 6.0]))
    metrics.observe_step(
        make_step(offered_tokens=[0, 0, 2], trained_tokens=[0, 0, 0.0], stale_groups=[0, 0, 1], stale_tokens=[0, 0, 2])
    )
    samples = scrape(metrics)
    assert samples["counterflow_stale_total{prompt_tokens=4,unit=groups}"] == 1
    assert samples["counterflow_stale_total{prompt_tokens=4,unit=tokens}"] == 2
    assert samples["counterflow_prompt_length_tokens_total{prompt_tokens=2,side=trained}"] == 6
    assert samples["counterflow_prompt_length_tokens_total{prompt_tokens=4,side=offered}"] == 2
    assert samples["counterflow_prompt_length_distance"] == 0.25
