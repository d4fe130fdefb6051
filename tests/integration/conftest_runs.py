"""What whole-run tests share: inputs for a tiny random model, a run started as a user starts it, and what it left."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

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
