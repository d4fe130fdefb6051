"""What asynchrony buys: wall-clock to the same number of trained tokens, max_lag=4 against max_lag=0.

The same code and configuration, one run each in turn, at a size where generating and training a batch cost about the
same; the ratio can then be 2 at most. Start-up is left out: the clock runs from the first step to the last.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common import TINY, arguments, compare, publish, random_model, write_prompts

from counterflow.recorder import RunRecords, read_run

RESPONSE_TOKENS = 40
STEPS = 24


def run(folder: Path, max_lag: int) -> RunRecords:
    """One run on this machine, through the command line."""
    settings = {
        "run.folder": folder / "runs",
        "run.name": f"lag-{max_lag}",
        "run.steps": STEPS,
        "model.path": folder / "model",
        "model.context_length": 128,
        "task.path": folder / "prompts.jsonl",
        "sampling.max_tokens": RESPONSE_TOKENS,
        "admission.groups_per_step": 16,
        "admission.samples_per_group": 8,
        "admission.max_lag": max_lag,
        "evaluation.prompts": 1,
        "evaluation.every": 0,
        "learner.lr": 1e-6,
    }
    (folder / "empty.yaml").write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "counterflow.cli", "run", str(folder / "empty.yaml")]
    subprocess.run([*command, *(f"{key}={value}" for key, value in settings.items())], check=True)
    return read_run(folder / "runs" / f"lag-{max_lag}")


def rate(records: RunRecords) -> float:
    """Trained tokens a second, from the start of the first step to the end of the last."""
    learner = [i for i in records.intervals if i.owner == "learner"]
    wall_s = max(i.end_s for i in learner) - min(i.start_s for i in learner)
    return sum(step.tokens for step in records.steps) / wall_s


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random_model(folder / "model", TINY, "float32")
        write_prompts(folder / "prompts.jsonl", count=1000, length=8)
        synchronous, asynchronous = run(folder, 0), run(folder, 4)
    waiting = sum(step.wait_s for step in synchronous.steps)
    training = sum(step.train_s for step in synchronous.steps)
    print(f"max_lag=0: {waiting:.1f} s waiting for generation, {training:.1f} s training (balanced: equal)")
    lags = [step.lag_mean for step in asynchronous.steps]
    print(f"max_lag=4: mean lag {sum(lags) / len(lags):.2f}")
    name = f"trained tokens/s, max_lag=4 over max_lag=0, {STEPS} steps of 128 x {RESPONSE_TOKENS} tokens, tiny Llama"
    row = compare(name, rate(asynchronous), rate(synchronous), "higher", 1.5)
    publish("Overlap of generation and learning", [row], options.json)


if __name__ == "__main__":
    main()
