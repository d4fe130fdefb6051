"""Actors that come and go while a run goes on, with real processes: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest_runs import Start, command_line, shared_memory, wait_for, write_inputs

from counterflow.buffer.archive import read_steps

SLOW_REWARD = """
import pathlib, time

def score(completion, record):
    if not pathlib.Path("FOLDER/hurry").exists():
        time.sleep(0.1)
    return float(completion.count(record["answer"]))
"""


def slowed(folder: Path, model: Path) -> Path:
    """Inputs of a run that takes its time until there is a file `hurry`."""
    config = write_inputs(folder, model, ["7", "1", "2", "3"] * 4)
    (folder / "my_reward.py").write_text(SLOW_REWARD.replace("FOLDER", str(folder)))
    return config


def scale(folder: Path, actors: int) -> str:
    command = [sys.executable, "-m", "counterflow.cli", "scale", "runs/run", "--actors", str(actors)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def processes(name: str) -> list[psutil.Process]:
    """Those of this test's runs, on whichever Ray cluster, that are called so."""
    return [p for p in psutil.Process().children(recursive=True) if name in command_line(p)]


@pytest.mark.parametrize(("engine", "steps"), [("transformers", 40), pytest.param("vllm", 160, marks=pytest.mark.slow)])
def test_actors_that_come_and_go_take_groups_with_them(
    engine: str, steps: int, start: Start, tiny_model: Path, tmp_path: Path, three_cores: str
) -> None:
    options = [f"run.steps={steps}", f"actors.engine={engine}", "actors.max_restarts=0", "admission.lease_s=15"]
    options += [f"run.ray_address={three_cores}", "run.placement_timeout_s=3", "evaluation.every=0"]
    run = start(tmp_path, slowed(tmp_path, tiny_model), *options)
    wait_for(run, r"^step (?!1/)")
    (first,) = processes("RolloutActor")
    assert scale(tmp_path, 2) == "1 actor(s) serve, 2 are to: the run says when one joins or leaves\n"
    wait_for(run, r"actor 1 has joined")
    assert scale(tmp_path, 3).startswith("2 actor(s) serve, 3 are to")
    wait_for(run, r"actor 2 cannot join, the run goes on with 2: .*actor 2 \(1 CPU\)")
    scale(tmp_path, 1)
    wait_for(run, r"actor 1 has left")
    scale(tmp_path, 2)
    wait_for(run, r"actor 1 has joined")
    first.kill()
    wait_for(run, r"actor 0 was lost, after 0 replacements .*; the run goes on with 1")
    (tmp_path / "hurry").touch()
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    folder = tmp_path / "runs" / "run"
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    assert ledger["closes"] and ledger["trained"] == 4 * steps and not ledger["dropped"].get("poison")
    archived = read_steps(folder / "archive")
    trained = [batch.column("admission")[0].as_py() for step in archived for batch in step.groups]
    assert trained == list(range(4 * steps))
    served = Counter(
        event["actor"]
        for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        if event["event"] == "version_served"
    )
    assert served.keys() == {0, 1}
    assert shared_memory() == set()


@pytest.mark.slow
def test_hanging_engine_hangs_the_run(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    options = ["run.steps=30", "actors.heartbeat_timeout_s=20", "weight_sync.timeout_s=30", "admission.lease_s=15"]
    run = start(tmp_path, slowed(tmp_path, tiny_model), *options, "evaluation.every=0")
    wait_for(run, r"^step (?!1/)")
    engine = processes("VLLM::")
    for process in engine:
        process.suspend()
    said = wait_for(run, r"actor 0 is replaced")
    # A version that it was to load by then has a deadline of its own.
    assert re.search(
        r"the engine hangs: it said nothing for 20 s|waited 30 s for policy version \d+ to be (loaded|served)", said
    )
    assert engine and psutil.wait_procs(engine, timeout=60)[1] == []
    (tmp_path / "hurry").touch()
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    ledger = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["ledger"]
    assert ledger["closes"] and ledger["trained"] == 120


@pytest.fixture
def two_nodes() -> Iterator[object]:
    """A Ray cluster with one node for the learner and one for an actor, and a head that runs neither."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.mark.parametrize("comes_back", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lost_node_is_waited_for_without_end(
    comes_back: bool, start: Start, tiny_model: Path, tmp_path: Path, two_nodes: object
) -> None:
    cluster: object = two_nodes
    options = [f"run.ray_address={cluster.address}", "actors.engine=transformers", "evaluation.every=0"]  # type: ignore[attr-defined]
    options += ["run.steps=20", "admission.lease_s=15", f"run.step_timeout_s={300 if comes_back else 15}"]
    run = start(tmp_path, slowed(tmp_path, tiny_model), *options)
    wait_for(run, r"^step (?!1/)")
    remove_node_of_the_actor(cluster)
    wait_for(run, r"actor 0 is replaced")
    (tmp_path / "hurry").touch()
    if comes_back:
        cluster.add_node(num_cpus=1)  # type: ignore[attr-defined]
    output, _ = run.communicate(timeout=400)
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["ledger"]["closes"]
    if comes_back:
        assert run.returncode == 0, output
        assert summary["ledger"]["trained"] == 80
    else:
        assert run.returncode == 1, output
        assert re.search(r"error: no actor generates, the learner waited 15 s for .*\(actor 0: .*\)", output), output


def remove_node_of_the_actor(cluster: object) -> None:
    """Remove the node whose Ray runs the rollout actor."""
    (actor,) = processes("RolloutActor")
    above = {parent.pid for parent in actor.parents()}
    (node,) = [
        node
        for node in cluster.list_all_nodes()  # type: ignore[attr-defined]
        if any(info.process.pid in above for infos in node.all_processes.values() for info in infos)
    ]
    cluster.remove_node(node)  # type: ignore[attr-defined]
