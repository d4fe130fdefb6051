"""A whole run with a user's own environment: the learner trains what the model said, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest_runs import Start, shared_memory, wait_for, write_inputs

from counterflow.buffer.archive import read_steps
from counterflow.buffer.codec import from_batch
from counterflow.learner.packing import scored

ENVIRONMENT = """
from counterflow.actors.environments import Step

class Counter:
    '''Says 99 after a turn, once; rewards each 7 that it hears.'''

    def __init__(self, tokenizer):
        self.tokenizer, self.turns = tokenizer, 0

    async def reset(self, record):
        self.answer = record["answer"]

    async def step(self, turn_token_ids):
        self.turns += 1
        if self.answer == "break":
            raise RuntimeError("an environment that breaks")
        heard = self.tokenizer.decode(turn_token_ids).count("7")
        said = tuple(self.tokenizer.encode("99", add_special_tokens=False))
        return Step(said, float(heard), done=self.turns == 2)
"""


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_environment_tokens_are_trained(engine: str, start: Start, tiny_model: Path, tmp_path: Path) -> None:
    config = write_inputs(tmp_path, tiny_model, [*"7135792468135", "break", *"79", "1", "2"])
    (tmp_path / "my_environment.py").write_text(ENVIRONMENT)
    process = start(
        tmp_path,
        config,
        f"actors.engine={engine}",
        "run.steps=4",
        "task.environment=my_environment:Counter",
        "reward.name=environment",
        "sampling.max_tokens=24",
        "sampling.stop=['7', '3', '1']",
    )
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    folder = tmp_path / "runs" / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"]["closes"] and summary["steps"] == 4
    groups = [from_batch(batch) for step in read_steps(folder / "archive") for batch in step.groups]
    # A sample of "break" may have come to its end before the environment had its turn, and be scored.
    trained = [t for group in groups for t in scored(group)]
    answered = [t for t in trained if t.loss_mask is not None]
    assert answered
    for trajectory in answered:
        assert trajectory.loss_mask is not None
        (said,) = np.nonzero(~trajectory.loss_mask)
        # `99`, in the tokens of this model, right after a turn.
        assert trajectory.response_token_ids[said].tolist() == [13, 13] and said[1] == said[0] + 1 > 1
        assert not trajectory.behavior_logprobs[said].any() and trajectory.behavior_logprobs[said[0] - 1] < 0
        assert trajectory.reward in (0.0, 1.0, 2.0) and trajectory.reward_parts == {"environment": trajectory.reward}
        assert trajectory.version_spans[-1].end == len(trajectory.response_token_ids) <= 24
    masked = sum(int((~t.loss_mask).sum()) for t in answered if t.loss_mask is not None)
    steps = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert sum(row["tokens"] for row in steps) == sum(len(t.response_token_ids) for t in trained) - masked
    evaluations = pq.read_table(folder / "evaluations.parquet").to_pylist()
    assert all(row["n"] > 0 for row in evaluations)


SLOW_ENVIRONMENT = """
import asyncio, pathlib

from counterflow.actors.environments import Step

FOLDER = pathlib.Path("HERE")


class Waits:
    '''Once armed, keeps one response waiting in its middle until it is released.'''

    def __init__(self, tokenizer):
        self.turns = 0

    async def reset(self, record):
        try:
            (FOLDER / "armed").rename(FOLDER / "waiting")
            self.waits = True
        except FileNotFoundError:
            self.waits = False

    async def step(self, turn_token_ids):
        self.turns += 1
        while self.waits and self.turns == 1 and not (FOLDER / "released").exists():
            await asyncio.sleep(0.05)
        return Step((13, 13), done=not self.waits or self.turns == 2)
"""


def test_response_of_more_versions_than_the_lag_bound_ends_the_run(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    config = write_inputs(tmp_path, tiny_model, [*"7135792468135792468"])
    (tmp_path / "my_environment.py").write_text(SLOW_ENVIRONMENT.replace("HERE", str(tmp_path)))
    options = ["task.environment=my_environment:Waits", "task.environment_timeout_s=300", "sampling.max_tokens=24"]
    options += ["sampling.stop=['7', '3', '1']", "buffer.order=ready", "admission.staleness=mask_tokens"]
    run = start(
        tmp_path,
        config,
        *options,
        "admission.max_lag=1",
        "run.steps=60",
        "actors.engine=transformers",
        "evaluation.every=0",
    )
    wait_for(run, r"^step (?!1/)")
    (tmp_path / "armed").touch()
    said = ""
    while not (tmp_path / "waiting").exists():
        said = wait_for(run, r"^step ")
    before = int(said.rsplit("step ", 1)[1].split("/")[0])
    while int(said.rsplit("step ", 1)[1].split("/")[0]) < before + 6:
        said = wait_for(run, r"^step ")
    (tmp_path / "released").touch()
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output
    folder = tmp_path / "runs" / "run"
    assert json.loads((folder / "summary.json").read_text())["ledger"]["closes"]
    trained = [
        trajectory
        for step in read_steps(folder / "archive")
        for batch in step.groups
        for trajectory in from_batch(batch).trajectories
    ]
    widest = max(t.version_spans[-1].version - t.version_spans[0].version for t in trained if t.version_spans)
    assert widest >= 4
    assert max(row["lag_max"] for row in pq.read_table(folder / "metrics.parquet").to_pylist()) <= 1
    assert shared_memory() == set()
