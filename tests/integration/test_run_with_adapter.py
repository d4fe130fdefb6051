"""A whole run that trains an adapter: through a death of the learner to the end, and once more from its archive."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest_runs import Start, command_line, family, trained_once, wait_for, wait_for_checkpoint, write_inputs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from counterflow.cli import app

pytest.importorskip("peft")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_adapter_is_lost_with_the_learner_or_differs_from_what_was_served(
    start: Start, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    config = write_inputs(tmp_path, tiny_model, ["7", "1", "2", "3"] * 4)
    options = ["learner.lora.rank=4", "learner.lr=1e-2", f"actors.engine={engine}", "weight_sync.canary_every=5"]
    options += ["run.steps=40", "checkpoint.every=5", "evaluation.every=0"]
    process = start(tmp_path, config, *options)
    wait_for(process, r"^step \d")
    wait_for_checkpoint(process, tmp_path)
    (learner,) = [child for child in family(process) if "::Learner" in command_line(child)]
    learner.kill()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert re.search(r"going on from version .* the checkpoint of version \d", output)
    run = tmp_path / "runs" / "run"
    trained_once(run, 40, 4)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    canaries = [event for event in events if event["event"] == "canary"]
    assert max(event["policy_version"] for event in canaries) >= 10 and all(e["mean"] < 1e-4 for e in canaries)
    merged = AutoModelForCausalLM.from_pretrained(run / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert (merged(ids).logits - base(ids).logits).abs().max() > 0.01
    command = ["replay", str(run), "--model", str(tmp_path / "again")]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0 and "40 of 40 recorded steps are the same" in shown.output, shown.output
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = load_file(run / "model" / name), load_file(tmp_path / "again" / name)
        assert all(torch.equal(theirs[key], tensor) for key, tensor in ours.items())
