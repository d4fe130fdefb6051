"""kill -9 of a run at random moments, then `--resume`: nothing lost or trained twice, and the weights are the same."""

from __future__ import annotations

import json
import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from conftest_runs import (
    Start,
    command_line,
    family,
    resume,
    shared_memory,
    trained_once,
    wait_for,
    wait_for_checkpoint,
    write_inputs,
)
from safetensors.torch import load_file

from counterflow.configs import load_config
from counterflow.learner.replay import replay
from counterflow.learner.trainer import Trainer

PER_STEP = 4


def learner_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    """The learner's process, which Ray names after its class and what it does."""
    with suppress(psutil.NoSuchProcess):
        return next((child for child in family(process) if "::Learner" in command_line(child)), None)
    return None


def check(run: Path, steps: int) -> None:
    """Every group once and in order, the ledger closed, one record a step; and weights as of a life without deaths."""
    trained_once(run, steps, PER_STEP)
    trainer = Trainer(load_config(run / "config.yaml"))
    assert len(list(replay(trainer, run / "archive", None, float("inf")))) == steps
    saved = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.policy.model.named_parameters())


@pytest.mark.parametrize(
    ("engine", "max_lag"),
    [("transformers", 0), *(pytest.param("vllm", lag, marks=pytest.mark.slow) for lag in (0, 2))],
)
def test_killed_run_loses_or_repeats_groups(
    start: Start, tiny_model: Path, tmp_path: Path, engine: str, max_lag: int
) -> None:
    """First the learner, which is begun again by itself; then, while steps are taken, the whole run."""
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    options = ["run.steps=40", f"admission.max_lag={max_lag}", "checkpoint.every=5", "evaluation.every=0"]
    options.append(f"actors.engine={engine}")
    process = start(tmp_path, config, *options)
    wait_for(process, r"^step (?!1/)")
    learner = learner_of(process)
    assert learner is not None
    learner.kill()
    said = wait_for(process, r"going on from version")
    assert "the run goes on from its newest checkpoint (restart 1 of 3)" in said
    wait_for(process, r"^step \d")
    wait_for_checkpoint(process, tmp_path)
    time.sleep(random.Random(max_lag).uniform(0, 0.5))
    process.kill()
    process.communicate(timeout=30)
    resumed = resume(start, tmp_path)
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    assert "going on from version" in output and "the checkpoint of version" in output
    check(tmp_path / "runs" / "run", 40)
    assert shared_memory() == set()
    again = resume(start, tmp_path)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 2 and "the run is complete, with 40 steps: raise run.steps to go on" in output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_deaths_lose_or_repeat_groups(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """The learner or the whole run, at thirty moments that follow from a seed: two of three while steps are taken.

    A checkpoint is made at every step; an engine that starts at once leaves time for more of both.
    """
    moments, steps = random.Random(7), 500
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    options = (f"run.steps={steps}", "checkpoint.every=1", "evaluation.every=0", "learner.max_restarts=100")
    options += ("actors.engine=transformers",)
    process, deaths = start(tmp_path, config, *options), []
    while len(deaths) < 30:
        if len(deaths) % 3 < 2:
            wait_for(process, r"^step \d")
            time.sleep(moments.uniform(0, 4))
        else:
            # Nobody reads its output meanwhile: there is little.
            time.sleep(moments.uniform(0, 20))
        assert process.poll() is None, "the run ended before the last death: give it more steps"
        learner = learner_of(process)
        if learner is not None and moments.random() < 0.5:
            deaths.append("learner")
            learner.kill()
            wait_for(process, "the run goes on from its newest checkpoint")
            continue
        deaths.append("run")
        process.kill()
        process.communicate(timeout=60)
        process = resume(start, tmp_path)
    print(deaths)
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    check(tmp_path / "runs" / "run", steps)
    events = [json.loads(line) for line in (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()]
    assert {"run", "learner"} == set(deaths) and any(event["event"] == "learner_lost" for event in events)


def test_resumed_run_may_become_another(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """What is refused is refused before anything starts."""
    write_inputs(tmp_path, tiny_model, ["7"] * 4)
    run = tmp_path / "runs" / "run"

    def refused(*options: str) -> str:
        process = resume(start, tmp_path, *options)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        return output

    assert "is no run folder" in refused()
    run.mkdir(parents=True)
    (run / "config.yaml").write_text((tmp_path / "config.yaml").read_text())
    assert "ended before it began to generate" in refused()
    assert "override learner.lr, run.seed: a resumed run trains as it did before" in refused(
        "learner.lr=1", "run.seed=3"
    )
