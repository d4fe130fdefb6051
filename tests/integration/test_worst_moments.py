"""kill -9 of an actor in the midst of generation, reward, addition or update: nothing is lost or trained twice.

The actor kills itself, by an environment that wraps what it does: so the moment is exact. It has the transformers
engine; engines of vLLM are killed in `tests/actors/test_engine_transports.py` and `test_death.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest_runs import Start, shared_memory, wait_for, write_inputs

from counterflow.buffer.archive import read_steps

KILLS, STEPS = 10, 80

SABOTEUR = """
import asyncio, itertools, os, pathlib, signal, time

from counterflow.actors import decoding, rewards, transformers_engine
from counterflow.actors.environments import Step
from counterflow.buffer import producer

ORDER = pathlib.Path("FOLDER/order")


class Saboteur:
    '''Ends each response at its first turn, and its process when it is ordered to: the order says where.'''

    def __init__(self, tokenizer):
        pass

    async def reset(self, record):
        pass

    async def step(self, turn_token_ids):
        return Step(done=True)


def ordered(moment):
    '''How far into the moment, from 0 to 1; None where nothing was ordered.'''
    try:
        where, far = ORDER.read_text().split()
    except (OSError, ValueError):
        return None
    return float(far) if where == moment else None


def obey():
    try:
        ORDER.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def in_generation(step):
    def struck(self, version, *, recompute):
        far = ordered("generation")
        if far is not None and len(self._responses[0].token_ids) >= 6 * far:
            obey()
        return step(self, version, recompute=recompute)
    return struck


def during(moment, call, seconds):
    async def struck(self, *arguments):
        far = ordered(moment)
        going_on = asyncio.ensure_future(call(self, *arguments))
        if far is not None:
            await asyncio.sleep(seconds * far)
            obey()
        return await going_on
    return struck


def in_update(take):
    def struck(self, tensors):
        far = ordered("update")
        def torn():
            for i, tensor in enumerate(tensors):
                if far is not None and i >= 10 * far:
                    obey()
                yield tensor
        take(self, torn())
    return struck


decoding.Decoding.step = in_generation(decoding.Decoding.step)
rewards.RewardPool.attempt = during("reward", rewards.RewardPool.attempt, 0.1)
producer.Producer._send = during("addition", producer.Producer._send, 0.003)
transformers_engine.TransformersEngine._take = in_update(transformers_engine.TransformersEngine._take)
"""
REWARD = """
import pathlib, time

def score(completion, record):
    if not pathlib.Path("FOLDER/hurry").exists():
        time.sleep(0.03)
    return float(completion.count(record["answer"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["generation", "reward", "addition", "update"])
def test_actor_killed_at_the_worst_moment_loses_or_repeats_groups(
    moment: str, start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    moments, answers = random.Random(moment), [str(i % 10) for i in range(4 * STEPS + 60)]
    config = write_inputs(tmp_path, tiny_model, answers)
    (tmp_path / "saboteur.py").write_text(SABOTEUR.replace("FOLDER", str(tmp_path)))
    (tmp_path / "my_reward.py").write_text(REWARD.replace("FOLDER", str(tmp_path)))
    options = [f"run.steps={STEPS}", "actors.engine=transformers", "task.environment=saboteur:Saboteur"]
    options += [f"actors.max_restarts={KILLS}", "admission.lease_s=5", "admission.attempts=20", "evaluation.every=0"]
    run = start(tmp_path, config, *options)
    said = wait_for(run, r"^step (?!1/)")
    for _ in range(KILLS):
        order = tmp_path / ".order"
        order.write_text(f"{moment} {moments.random()}")
        order.replace(tmp_path / "order")
        said += wait_for(run, r"actor 0 is replaced")
        # Or else the next one dies of the version that it joins with.
        if moment != "update" or moments.random() < 0.5:
            said += wait_for(run, r"actor 0 serves again")
    (tmp_path / "hurry").touch()
    rest, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said + rest
    assert (said + rest).count("actor 0 is replaced") == KILLS
    folder = tmp_path / "runs" / "run"
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    print(f"killed {KILLS} times in mid-{moment}: {ledger}")
    assert ledger["closes"] and ledger["trained"] == 4 * STEPS and set(ledger["dropped"]) <= {"duplicate", "abandoned"}
    steps = list(read_steps(folder / "archive"))
    groups = [batch for step in steps for batch in step.groups]
    assert [batch.column("admission")[0].as_py() for batch in groups] == list(range(4 * STEPS))
    assert len({batch.column("prompt_id")[0].as_py() for batch in groups}) == 4 * STEPS
    assert max(row["lag_max"] for row in pq.read_table(folder / "metrics.parquet").to_pylist()) <= 2
    assert shared_memory() == set()
