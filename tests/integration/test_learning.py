"""The quickstart learns off-policy, and only from its rewards: whole runs from three seeds, each beside its control."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from counterflow.configs import load_config

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def finish(folder: Path, seed: int, *overrides: str) -> dict[str, Any]:
    """Run the quickstart to its end and return its summary, checked for what every whole run must show."""
    command = [sys.executable, "-m", "counterflow.cli", "run", str(QUICKSTART)]
    done = subprocess.run(
        [*command, f"run.seed={seed}", f"run.folder={folder}", *overrides],
        cwd=REPOSITORY,  # the preset names its model and prompts from here
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((folder / "quickstart" / "summary.json").read_text())
    config = load_config(QUICKSTART, [])
    assert (summary["status"], summary["seed"], summary["steps"]) == ("completed", seed, config.run.steps)
    assert summary["ledger"]["closes"]
    assert 0 < summary["lag"]["mean"] <= summary["lag"]["max"] <= config.admission.max_lag
    assert summary["heldout_before"]["n"] == summary["heldout_after"]["n"] == config.evaluation.prompts
    return summary


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stale_samples_teach_nothing(tmp_path: Path, seed: int) -> None:
    summary = finish(tmp_path, seed)
    before, after = summary["heldout_before"], summary["heldout_after"]
    assert after["low"] > before["high"], (before, after)
    assert after["rate"] >= 0.6, (before, after)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shuffled_rewards_teach_something(tmp_path: Path, seed: int) -> None:
    summary = finish(tmp_path, seed, "reward.shuffle=true")
    before, after = summary["heldout_before"], summary["heldout_after"]
    assert after["low"] <= before["high"], (before, after)
