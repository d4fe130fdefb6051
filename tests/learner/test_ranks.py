"""One, two and three real processes over gloo: the same gradients, the same weights, whole weights for the actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from groups import uneven_groups
from rank_processes import in_processes
from torch import Tensor
from torch.distributed.tensor import DTensor

from counterflow.configs.schema import RunConfig
from counterflow.learner.backends.deepspeed_backend import DeepSpeedBackend
from counterflow.learner.objective.loss import normalizer
from counterflow.learner.objective_choice import objective_spec
from counterflow.learner.packing import scored
from counterflow.learner.plan import plan
from counterflow.learner.rank import Rank

STEPS = 5
ZERO = ["zero1", "zero2", "zero3"]
BACKENDS = ["ddp", "fsdp2", *(pytest.param(backend, marks=pytest.mark.slow) for backend in ZERO)]
OBJECTIVES = {
    "default": {"kl": {"beta": 0.05}},
    "rao_blackwell": {"kl": {"beta": 0.05, "estimator": "rao_blackwell", "placement": "loss"}},
}
# Two groups leave the third of three ranks without work.
CASES = [("default", 5, 1), ("default", 2, 1), ("default", 5, 2), ("rao_blackwell", 4, 1)]
"""Objective, groups of a batch, updates of a batch."""


def configured(folder: Path, objective: str, updates: int, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "run": {"step_timeout_s": 120},
            "learner": {"lr": 1e-3, "microbatch_tokens": 60, "updates_per_batch": updates, **learner},
            "objective": OBJECTIVES[objective],
        }
    )


def steps(rank: Rank, config: RunConfig, number: int, which: range, groups: int = 5) -> Tensor:
    """Take these steps; returns the gradient of the first update."""
    spec, learner = objective_spec(config), config.learner
    gradient = None
    for step in which:
        batch = uneven_groups(groups, seed=step)
        updates = plan(batch, learner.updates_per_batch, learner.ranks, learner.microbatch_tokens, rank.packing)
        rank.begin([update.rounds[number] for update in updates], 0, again=False, needs_proximal=False)
        for index, update in enumerate(updates):
            trained = [t for i in update.order for t in scored(batch[i])]
            tokens = sum(len(t.response_token_ids) for t in trained)
            rank.accumulate(index, spec, normalizer(spec.reduction, len(trained), tokens, 16))
            if gradient is None:
                gradient = whole_gradient(rank)
            rank.apply(learner.lr)
    assert gradient is not None
    return gradient


def train(config: RunConfig, groups: int, number: int) -> tuple[Tensor, Tensor]:
    """Gradient of the first update, and what five steps made of the weights: flat, whole."""
    rank = Rank(config)
    gradient = steps(rank, config, number, range(STEPS), groups)
    return gradient, torch.cat([tensor.flatten().clone() for _, tensor in rank.weights()])


def whole_gradient(rank: Rank) -> Tensor:
    if isinstance(rank.backend, DeepSpeedBackend):
        from deepspeed.utils import safe_get_full_grad

        return torch.cat([safe_get_full_grad(p).flatten().clone() for p in rank.policy.model.parameters()])
    trained = [p for p in rank.policy.model.parameters() if p.requires_grad]
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in trained]
    return torch.cat([gradient.flatten().clone() for gradient in found])


def train_all(number: int, configs: list[RunConfig]) -> list[list[Any]]:
    found = [train(config, groups, number) for config, (_, groups, _) in zip(configs, CASES, strict=True)]
    return [[tensor.numpy() for tensor in case] for case in found]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[tuple[Tensor, Tensor]]:
    """The same in this process."""
    return [train(configured(tiny_model, objective, updates), groups, 0) for objective, groups, updates in CASES]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_processes_are_one(tiny_model: Path, alone: list[tuple[Tensor, Tensor]], ranks: int, backend: str):
    if backend in ZERO:
        pytest.importorskip("deepspeed")
    start = torch.cat([t.flatten() for _, t in Rank(configured(tiny_model, "default", 1)).weights()])
    configs = [configured(tiny_model, name, updates, ranks=ranks, backend=backend) for name, _, updates in CASES]
    found = in_processes(configs[0], train_all, configs)
    for (gradient, weights), (expected, target) in zip(found, alone, strict=True):
        gradient, weights = torch.from_numpy(gradient), torch.from_numpy(weights)
        assert (gradient - expected).norm() <= 1e-5 * expected.norm() > 0
        moved = (target - start).norm()
        assert (weights - target).norm() <= 1e-3 * moved
