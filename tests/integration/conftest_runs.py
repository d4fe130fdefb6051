"""What whole-run tests share: inputs for a tiny random model, a run started as a user starts it, and what it left."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from counterflow.buffer.archive import read_steps
from counterflow.cli_ledger import find
from counterflow.learner.checkpoint import versions

Start = Callable[..., subprocess.Popen[str]]

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


def wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    """Read output until a line matches; returns what was read."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if re.search(pattern, line):
            return read
    pytest.fail(f"the run ended before it said {pattern!r}:\n{read}")


def wait_for_checkpoint(process: subprocess.Popen[str], folder: Path) -> None:
    """Until a whole checkpoint lies there: no step waits for it, so that a slow disk may be many steps behind."""
    while not versions(folder / "runs" / "run" / "checkpoints"):
        assert process.poll() is None, "the run ended before it had a checkpoint"
        time.sleep(0.02)


def resume(start: Start, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Go on with the run in `folder`."""
    return start(folder, Path("--resume"), str(folder / "runs" / "run"), *options)


def trained_once(run: Path, steps: int, groups_per_step: int) -> None:
    """See that every group was trained once and in order, that the ledger closes, and that each step has its record."""
    archived = list(read_steps(run / "archive"))
    assert [step.learner_version for step in archived] == list(range(steps))
    trained = [batch.column("admission")[0].as_py() for step in archived for batch in step.groups]
    assert trained == list(range(steps * groups_per_step))
    found = find(run)
    assert found.complaints == [] and found.ledger.trained == steps * groups_per_step
    assert found.ledger.closes and found.ledger.buffered == found.ledger.in_flight == 0
    assert pq.read_table(run / "metrics.parquet").column("step").to_pylist() == list(range(1, steps + 1))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes that the run has started and that still belong to it."""
    return psutil.Process(process.pid).children(recursive=True)


def command_line(process: psutil.Process) -> str:
    """Its command and arguments; nothing where it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def shared_memory(*prefixes: str) -> set[str]:
    """Names in memory that begin so: the run's own by default."""
    folder = Path("/dev/shm")
    begins = prefixes or ("counterflow",)
    return {path.name for path in folder.iterdir() if path.name.startswith(begins)} if folder.is_dir() else set()
