"""kill -9 of one process of a run: the run says which died, ends with exit code 1, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from conftest_runs import Start, command_line, family, shared_memory, wait_for, write_inputs

from counterflow.processes import shared_memory as mapped_segments


def vanish(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those still alive after a while, resource trackers that end by themselves included."""
    return psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("RolloutActor", "actor 0"),
        ("VLLM::EngineCore", "engine"),
        ("Learner", "learner"),
    ],
)
@pytest.mark.slow
def test_death_of_a_process_hangs_the_run(
    start: Start, tiny_model: Path, tmp_path: Path, victim: str, words: str
) -> None:
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    process = start(tmp_path, config, "run.steps=5000", "actors.max_restarts=0", "learner.max_restarts=0")
    wait_for(process, r"^step (?!1/)")
    children = family(process)
    (target,) = [child for child in children if victim in command_line(child)]
    target.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    (said,) = [line for line in output.splitlines() if line.startswith("counterflow: error: ")]
    assert words in said
    assert vanish(children, within_s=60) == []
    assert shared_memory() == set()
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["reason"] in said and summary["steps"] > 0


@pytest.mark.parametrize(
    ("victim", "transport"),
    [
        pytest.param("RolloutActor", "shared_memory", marks=pytest.mark.slow),
        pytest.param("VLLM::EngineCore", "shared_memory", marks=pytest.mark.slow),
        pytest.param("RolloutActor", "gloo", marks=pytest.mark.slow),
        pytest.param("VLLM::EngineCore", "gloo", marks=pytest.mark.slow),
        pytest.param("RolloutActor", "disk", marks=pytest.mark.slow),
    ],
)
def test_death_of_an_actor_ends_the_run(
    start: Start, tiny_model: Path, tmp_path: Path, victim: str, transport: str
) -> None:
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    options = ("run.steps=30", "admission.lease_s=3", f"weight_sync.transport={transport}")
    process = start(tmp_path, config, *options)
    wait_for(process, r"^step (?!1/)")
    children = family(process)
    (target,) = [child for child in children if victim in command_line(child)]
    segments = mapped_segments(children)
    target.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert segments and not any(segment.exists() for segment in segments)
    assert "actor 0 is replaced" in output and "actor 0 serves again, version " in output
    ledger = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["ledger"]
    assert ledger["closes"] and ledger["trained"] == 120
    assert shared_memory() == set()


@pytest.mark.slow
def test_death_of_the_embedded_server_ends_the_run(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4), "run.steps=20")
    wait_for(process, r"^step (?!1/)")
    (server,) = [child for child in family(process) if "valkey-server" in command_line(child)]
    server.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "the buffer's server had died and was started again on its data" in output
    assert "the buffer's server was started again: it had lost 0 steps, which it was told anew, and 0 groups" in output
    ledger = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["ledger"]
    assert ledger["closes"] and ledger["trained"] == 80


@pytest.mark.slow
def test_death_of_the_supervisor_leaves_processes_behind(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4), "run.steps=5000")
    wait_for(process, r"^step (?!1/)")
    children = family(process)
    process.kill()
    process.communicate(timeout=300)
    # Ray's own agents take a while to notice.
    assert vanish(children, within_s=180) == []
    assert shared_memory() == set()


@pytest.mark.slow
def test_termination_is_no_interrupt(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    process = start(tmp_path, write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4), "run.steps=5000")
    wait_for(process, r"^step (?!1/)")
    children = family(process)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert vanish(children, within_s=60) == []
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["status"] == "interrupted"
