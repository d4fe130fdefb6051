"""Whole runs whose learner has two ranks: to the end, through the death of either, and on with another number.

They join a Ray cluster with one core more than the machine may have: an actor, and a core for each rank.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from conftest_runs import (
    Start,
    command_line,
    free_port,
    resume,
    trained_once,
    wait_for,
    wait_for_checkpoint,
    write_inputs,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from counterflow.configs import load_config
from counterflow.learner.replay import replay
from counterflow.learner.trainer import Trainer

PER_STEP = 4
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Ray lets in who has the cluster's."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, psutil.Process]]:
    """The address of a Ray cluster of three CPUs, and the process that all of its processes belong to."""
    port = free_port()
    command = [
        *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=3"),
        *(f"--port={port}", "--include-dashboard=false", f"--object-store-memory={128 << 20}"),
        "--disable-usage-stats",
    ]
    environment = {**os.environ, **TOKEN, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
    head = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(head, "Ray runtime started")
        yield f"127.0.0.1:{port}", psutil.Process(head.pid)
    finally:
        left = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(timeout=30)
        for process in [psutil.Process(head.pid), *left] if head.poll() is None else left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def rank_of(head: psutil.Process, kind: str) -> psutil.Process:
    """The process of a Ray actor of the run, by its class: `Learner` is rank 0, `Follower` rank 1."""
    (found,) = [child for child in head.children(recursive=True) if f"::{kind}" in command_line(child)]
    return found


def check(run: Path, steps: int) -> None:
    """Every group once and in order, the ledger closed; the folder loads; the weights are those of one process."""
    trained_once(run, steps, PER_STEP)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["ledger"]["closes"]
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    saved = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.named_parameters())
    alone = Trainer(load_config(run / "config.yaml", ["learner.ranks=1"]))
    start = {name: tensor.detach().clone() for name, tensor in alone.policy.model.named_parameters()}
    assert len(list(replay(alone, run / "archive", None, float("inf")))) == steps
    found = dict(alone.policy.model.named_parameters())
    moved = sum(float((saved[name] - start[name]).norm()) for name in start)
    apart = sum(float((saved[name] - found[name].detach()).norm()) for name in start)
    print(f"two ranks and one are {apart / moved:.1e} of the way apart after {steps} steps")
    assert apart < 0.01 * moved


def test_two_ranks_do_not_finish_or_train_otherwise_than_one(
    start: Start, cluster: tuple[str, psutil.Process], tiny_model: Path, tmp_path: Path
) -> None:
    """Then the same run goes on with one."""
    address, _ = cluster
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    process = start(tmp_path, config, f"run.ray_address={address}", "learner.ranks=2", "checkpoint.every=4", **TOKEN)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    run = tmp_path / "runs" / "run"
    check(run, 6)
    resumed = resume(start, tmp_path, "learner.ranks=1", "run.ray_address=local", "run.steps=10")
    output, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, output
    assert "going on from version 6: the checkpoint of version 4" in output
    check(run, 10)


@pytest.mark.parametrize(("victim", "words"), [("Follower", "learner rank 1 of 2 died"), ("Learner", "the learner")])
def test_death_of_a_rank_ends_the_run_or_repeats_groups(
    start: Start, cluster: tuple[str, psutil.Process], tiny_model: Path, tmp_path: Path, victim: str, words: str
) -> None:
    address, head = cluster
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    options = ("learner.ranks=2", "run.steps=30", "checkpoint.every=5", "evaluation.every=0")
    process = start(tmp_path, config, f"run.ray_address={address}", *options, **TOKEN)
    wait_for(process, r"^step \d")
    wait_for_checkpoint(process, tmp_path)
    rank_of(head, victim).kill()
    said = wait_for(process, "the run goes on from its newest checkpoint")
    assert words in said.splitlines()[-1] and "(restart 1 of 3)" in said
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert re.search(r"the checkpoint of version \d", output)
    check(tmp_path / "runs" / "run", 30)
