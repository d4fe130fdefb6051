"""Trained tokens/s of one rank of the learner, against a bare torch loop and against TRL's GRPOTrainer.

All do the same forward, backward and AdamW step on the same completions. The bare loop has the same packed batch; ours
also forms advantages, weights and what the diagnostics need. Beside TRL, which pads, ours is a whole step of the
trainer, its record included, and TRL's a whole step of `train`, its metrics included: see `common/trl_steps.py`. In
turns, in one process, on one thread, in processor time, the fastest of each, so that neighbours do not count; memory in
a process of its own each. TRL's rows are left out where it cannot be imported. Then: packing against padding, both
ours; and what share of its time a learner waits whose buffer is full. Where there is a GPU: against a bare loop on it,
in bfloat16 and wall time, with the model FLOPs utilisation of both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from common import SMOLLM2_135M, TINY, Row, Shape, command_line, compare, publish, random_model
from common.full_buffer import waiting_share
from common.trl_steps import available, trl_steps

from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Group, Trajectory, VersionSpan
from counterflow.configs.schema import RunConfig
from counterflow.learner.batch import Microbatch, collate
from counterflow.learner.objective.loss import normalizer
from counterflow.learner.objective_choice import objective_spec
from counterflow.learner.packing import Packing, split
from counterflow.learner.policy import load_model
from counterflow.learner.rank import Rank
from counterflow.learner.trainer import Trainer

GOAL, GOAL_OVER_TRL, MOST_WAITING = 0.93, 1.3, 0.02
CPU = torch.device("cpu")
PEAK_FLOPS = 989e12
"""Of an H100 or H200, bfloat16, dense (NVIDIA's data sheet)."""
QWEN_0_5B = Shape(151_936, 896, 24, 14, 2, 4_864)


def uneven_groups(count: int, samples: int, longest: int, vocabulary: int) -> list[Group]:
    """Prompts of an eighth of `longest`, responses of a quarter of it up to the whole."""
    draw = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return draw.integers(2, vocabulary, length).astype(np.int32)

    def trajectory() -> Trajectory:
        length = int(draw.integers(longest // 4, longest + 1))
        logprobs = np.full(length, -np.log(vocabulary), np.float32)
        return Trajectory(ids(length), logprobs, (VersionSpan(0, 0, length),), float(draw.integers(0, 2)), "stop")

    return [
        Group(f"group-{n}", n, n, ids(longest // 8), tuple(trajectory() for _ in range(samples)), 1, 2)
        for n in range(count)
    ]


def ours(config: RunConfig, groups: list[Group]) -> Callable[[], None]:
    """A step of one rank."""
    rank, spec = Rank(config), objective_spec(config)
    parts = split(groups, config.learner.microbatch_tokens, rank.packing)
    divisor = normalizer(spec.reduction, sum(len(g.trajectories) for g in groups), 0, config.sampling.max_tokens)

    def step() -> None:
        rank.begin([parts], 0, again=False, needs_proximal=False)
        rank.accumulate(0, spec, divisor)
        rank.apply(config.learner.lr)

    return step


def bare(config: RunConfig, batches: list[Microbatch]) -> Callable[[], None]:
    """What one would write by hand: logits of the response tokens, log_softmax, gather, a weighted sum."""
    device = torch.device("cuda") if config.learner.gpus else CPU
    model = load_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.lr, fused=True)
    weights = [torch.randn(batch.targets.shape[0], device=device) / 1000 for batch in batches]
    lower = torch.autocast(device.type, torch.bfloat16, enabled=config.learner.dtype == "bfloat16")

    def logits(batch: Microbatch) -> torch.Tensor:
        positions = None if batch.position_ids is None else batch.position_ids.to(device)
        out = model.base_model(input_ids=batch.input_ids.to(device), position_ids=positions, use_cache=False)
        return model.lm_head(out.last_hidden_state.flatten(0, 1)[batch.predictors.to(device)])

    def step() -> None:
        for batch, weight in zip(batches, weights, strict=True):
            with lower:
                found = logits(batch)
            targets = batch.targets.to(device)
            logprobs = torch.log_softmax(found.float(), -1).gather(-1, targets[:, None]).squeeze(-1)
            (weight * logprobs).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def fastest(
    steps: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Seconds of a step of each, the processor's by default, in turns, after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            began = clock()
            step()
            taken[name].append(clock() - began)
    return {name: min(seconds[1:]) for name, seconds in taken.items()}


def configured(path: Path, budget: int, packing: bool = True, steps: int = 1, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": steps},
            "model": {"path": str(path)},
            "admission": {"groups_per_step": 32, "max_lag": float("inf")},
            "learner": {"microbatch_tokens": budget, "packing": packing, **learner},
            "objective": {"kl": {"beta": 0.0}},
        }
    )


def trained(config: RunConfig, groups: list[Group]) -> Callable[[], object]:
    """A whole step of the trainer, with its record."""
    trainer, entries = Trainer(config), [Entry(b"", group, 0, 0) for group in groups]
    return lambda: trainer.train(entries)


def measure(name: str, shape: Shape, groups: list[Group], budget: int, repeats: int) -> list[Row]:
    """Rows of one model."""
    tokens = sum(group.response_tokens for group in groups)
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder), shape, "float32")
        parts = split(groups, budget, Packing.ROWS)
        seconds = fastest(
            {
                "ours": ours(configured(path, budget), groups),
                "bare": bare(configured(path, budget), [collate(part, 0, Packing.ROWS) for part in parts]),
                "padded": ours(configured(path, budget, packing=False), groups),
            },
            repeats,
        )
        rate = {side: tokens / taken for side, taken in seconds.items()}
        rows = [
            compare(f"{name}: trained tokens/s over bare torch", rate["ours"], rate["bare"], "higher", GOAL),
            compare(f"{name}: packed over padded, tokens/s", rate["ours"], rate["padded"], "higher", None),
        ]
        if (why := available()) is not None:
            print(f"{name}: no rows of TRL, which cannot be imported here ({why}): pip install trl")
            return rows
        # As many microbatches as ours: the smallest number of them that its sequences divide into.
        sequences = sum(len(group.trajectories) for group in groups)
        microbatches = next(n for n in range(len(parts), sequences + 1) if sequences % n == 0)
        config = configured(path, budget)
        with trl_steps(path, groups, config.learner.lr, microbatches, repeats + 1) as rival:
            sides = {"ours": trained(config, groups), "trl": rival}
            taken = fastest(sides, repeats)
    rows.append(
        compare(
            f"{name}: trained tokens/s over TRL's GRPOTrainer",
            tokens / taken["ours"],
            tokens / taken["trl"],
            "higher",
            GOAL_OVER_TRL,
        )
    )
    memory = [_peak_in_a_process(name, side, microbatches) / 1e6 for side in ("ours", "trl")]
    rows.append(compare(f"{name}: peak memory of two steps, MB", *memory, "lower", None))
    return rows


CASES = {
    "0.9 M": (TINY, lambda: uneven_groups(32, 8, 32, TINY.vocab_size), 4096, 4),
    "SmolLM2-135M": (SMOLLM2_135M, lambda: uneven_groups(2, 4, 192, SMOLLM2_135M.vocab_size), 2048, 1),
}
"""Shape, groups, tokens of a microbatch, repeats for each that is asked."""


def peak(name: str, side: str, microbatches: int) -> int:
    """Bytes of resident memory that loading a model and two steps on it add, at their peak, in this process."""
    shape, made, budget, _ = CASES[name]
    groups, process = made(), psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, so that its memory is not ours again.
        script = f"from pathlib import Path; from common import *; random_model(Path({folder!r}), {shape!r}, 'float32')"
        subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent, capture_output=True)
        before = process.memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")
        if side == "ours":
            step = trained(configured(Path(folder), budget), groups)
            step(), step()
        else:
            with trl_steps(Path(folder), groups, 1e-6, microbatches, 2) as rival:
                rival(), rival()
        status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0]) - before


def _peak_in_a_process(name: str, side: str, microbatches: int) -> int:
    command = [sys.executable, __file__, "--peak", name, side, str(microbatches)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def waiting(steps: int) -> Row:
    """How long the learner waits for groups that are all there."""
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder) / "model", TINY, "float32")
        groups = uneven_groups(32 * steps, 8, 32, TINY.vocab_size)
        share = waiting_share(configured(path, 4096, steps=steps), Path(folder) / "run", groups, steps)
    return Row("0.9 M: share waited for a full buffer", share, MOST_WAITING, MOST_WAITING / share, "lower", 1.0)


def device_rows(shape: Shape, groups: list[Group], budget: int, repeats: int, **learner: Any) -> list[Row]:
    """On a GPU. Not run on its author's machine, which has none; tried on its CPU, in small."""
    name, tokens = f"{shape.hidden_size} x {shape.num_hidden_layers} on a GPU", sum(g.response_tokens for g in groups)
    with tempfile.TemporaryDirectory() as folder:
        config = configured(random_model(Path(folder), shape, "float32"), budget, dtype="bfloat16", **learner)
        rank = Rank(config)
        parts, packing = split(groups, budget, rank.packing), rank.packing
        parameters = sum(p.numel() for p in rank.policy.model.parameters())
        del rank
        sides = {
            "ours": ours(config, groups),
            "bare": bare(config, [collate(part, 0, packing) for part in parts]),
        }
        seconds = fastest(sides, repeats, _device_time)
    # Forward and backward of all tokens, prompts included (Kaplan et al. 2020, 6 N D), without attention's own.
    read = sum(len(g.prompt_token_ids) * len(g.trajectories) + g.response_tokens for g in groups)
    utilisation = {side: 6 * parameters * read / taken / PEAK_FLOPS for side, taken in seconds.items()}
    rate = {side: tokens / taken for side, taken in seconds.items()}
    return [
        compare(f"{name}: trained tokens/s over bare torch", rate["ours"], rate["bare"], "higher", GOAL),
        compare(f"{name}: model FLOPs utilisation of 989 TFLOP/s", *utilisation.values(), "higher", None),
    ]


def _device_time() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts")
    parser.add_argument("--peak", nargs=3, metavar="WORD", help="used by the script itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        name, side, microbatches = options.peak
        print(peak(name, side, int(microbatches)))
        return
    rows = []
    for name, (shape, made, budget, times) in CASES.items():
        rows += measure(name, shape, made(), budget, times * options.repeats)
    rows.append(waiting(steps=6))
    if torch.cuda.is_available():
        groups = uneven_groups(16, 8, 1024, QWEN_0_5B.vocab_size)
        rows += device_rows(QWEN_0_5B, groups, 32_768, 4 * options.repeats, gpus=1)
    publish("one rank of the learner", rows, options.json)


if __name__ == "__main__":
    main()
