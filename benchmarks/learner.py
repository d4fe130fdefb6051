"""Trained tokens/s of one rank of the learner, against a bare torch loop on the same packed batch.

Both do the same forward, backward and step; ours also forms advantages, weights and what the diagnostics need. In
turns, in one process, on one thread, in processor time, the fastest of each, so that neighbours do not count. A last
row is packing against padding, both ours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import SMOLLM2_135M, TINY, Row, Shape, command_line, compare, publish, random_model

from counterflow.buffer.trajectory import Group, Trajectory, VersionSpan
from counterflow.configs.schema import RunConfig
from counterflow.learner.batch import Microbatch, collate
from counterflow.learner.objective.loss import normalizer
from counterflow.learner.objective_choice import objective_spec
from counterflow.learner.packing import Packing, split
from counterflow.learner.policy import load_model
from counterflow.learner.rank import Rank

GOAL = 0.93
CPU = torch.device("cpu")


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
        rank.begin([parts], again=False, needs_proximal=False)
        rank.accumulate(0, spec, divisor)
        rank.apply(config.learner.lr)

    return step


def bare(config: RunConfig, batches: list[Microbatch]) -> Callable[[], None]:
    """What one would write by hand: logits of the response tokens, log_softmax, gather, a weighted sum."""
    model = load_model(config, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.lr, fused=True)
    weights = [torch.randn(batch.targets.shape[0]) / 1000 for batch in batches]

    def step() -> None:
        for batch, weight in zip(batches, weights, strict=True):
            out = model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
            logits = model.lm_head(out.last_hidden_state.flatten(0, 1)[batch.predictors])
            logprobs = torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None]).squeeze(-1)
            (weight * logprobs).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def fastest(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Processor seconds of a step of each, in turns, after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            taken[name].append(time.process_time() - began)
    return {name: min(seconds[1:]) for name, seconds in taken.items()}


def measure(name: str, shape: Shape, groups: list[Group], budget: int, repeats: int) -> list[Row]:
    """Rows of one model."""
    tokens = sum(group.response_tokens for group in groups)
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder), shape, "float32")

        def configured(packing: bool) -> RunConfig:
            return RunConfig.model_validate(
                {
                    "model": {"path": str(path)},
                    "learner": {"microbatch_tokens": budget, "packing": packing},
                    "objective": {"kl": {"beta": 0.0}},
                }
            )

        batches = [collate(part, 0, Packing.ROWS) for part in split(groups, budget, Packing.ROWS)]
        seconds = fastest(
            {
                "ours": ours(configured(True), groups),
                "bare": bare(configured(True), batches),
                "padded": ours(configured(False), groups),
            },
            repeats,
        )
    rate = {side: tokens / taken for side, taken in seconds.items()}
    return [
        compare(f"{name}: trained tokens/s over bare torch", rate["ours"], rate["bare"], "higher", GOAL),
        compare(f"{name}: packed over padded, tokens/s", rate["ours"], rate["padded"], "higher", None),
    ]


def main() -> None:
    parser = command_line(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure("0.8 M", TINY, uneven_groups(32, 8, 32, TINY.vocab_size), 4096, 4 * options.repeats)
    rows += measure(
        "SmolLM2-135M", SMOLLM2_135M, uneven_groups(2, 4, 192, SMOLLM2_135M.vocab_size), 2048, options.repeats
    )
    publish("one rank of the learner", rows, options.json)


if __name__ == "__main__":
    main()
