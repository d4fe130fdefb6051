"""What may go wrong with the Grafana dashboard: it asks for what no run serves, or for a label that is not there."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from step_records import make_step

from counterflow.configs.run import MetricsSection
from counterflow.metrics import Metrics
from counterflow.records import EvaluationRecord, Ledger
from counterflow.weight_sync.canary import Gap

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "counterflow.json"
# Of the scraper, not of a run.
SCRAPED = {"job"}


def served() -> dict[str, set[str]]:
    """Names of all samples of a run that has seen everything, each with its labels."""
    metrics = Metrics(MetricsSection(), max_lag=4)
    by_length: dict[str, Any] = {name: [1.0, 2.0] for name in ("offered_tokens", "trained_tokens", "stale_groups")}
    metrics.observe_step(make_step(lag_histogram=[1, 2], **by_length))
    metrics.observe_evaluation(EvaluationRecord(3, 3, 1.0, 40, 100, 0.3, 0.5, 0.1))
    metrics.observe_ledger(Ledger(10, 6, 1, 1, {"stale": 2}, 100, 60, 10, {"stale": 30}))
    metrics.observe_canary(0, Gap(8, 0.01, 0.1, 0.0, 0.2))
    metrics.observe_admission(Counter({"full": 1}))
    with urllib.request.urlopen(metrics.url, timeout=5) as answer:
        text = answer.read().decode()
    metrics.close()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_panel_asks_for_what_no_run_serves() -> None:
    labels = served()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["targets"] and panel["description"], panel["title"]
        for target in panel["targets"]:
            expression = target["expr"]
            selected = re.findall(r"(counterflow_\w+)\{([^}]*)\}", expression)
            assert selected and len(selected) == expression.count("counterflow_"), expression
            for name, matchers in selected:
                assert name in labels, f"{panel['title']}: no run serves {name}"
                known = labels[name] | SCRAPED
                asked = set(re.findall(r"(\w+)(?:=~|!=|!~|=)", matchers))
                asked.update(*(re.split(r",\s*", names) for names in re.findall(r"by \(([^)]*)\)", expression)))
                asked.update(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert asked <= known, f"{panel['title']}: {name} has no label {asked - known}"


def test_lengths_offered_and_trained_are_beside_each_other() -> None:
    panels = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}
    asked = [target["expr"] for target in panels["Prompt lengths, offered against trained"]["targets"]]
    for side, expression in zip(("offered", "trained"), asked, strict=True):
        assert f'side="{side}"' in expression and "counterflow_prompt_length_tokens_total" in expression
