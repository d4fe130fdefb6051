"""One, two and three real processes over gloo: the same gradients, the same weights, whole weights for the actors."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import uneven_groups
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor

from counterflow.configs.schema import RunConfig
from counterflow.learner.backends.deepspeed_backend import DeepSpeedBackend
from counterflow.learner.objective.loss import normalizer
from counterflow.learner.objective_choice import objective_spec
from counterflow.learner.packing import scored
from counterflow.learner.plan import plan
from counterflow.learner.rank import Rank
from counterflow.learner.ranks import enter

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


def train(config: RunConfig, groups: int, number: int) -> tuple[list[Tensor], Tensor]:
    """Gradient of the first update, and what five steps made of the weights: flat, whole."""
    rank, spec, learner = Rank(config), objective_spec(config), config.learner
    gradient, first = torch.zeros(0), True
    for step in range(STEPS):
        batch = uneven_groups(groups, seed=step)
        updates = plan(batch, learner.updates_per_batch, learner.ranks, learner.microbatch_tokens, rank.packing)
        rank.begin([update.rounds[number] for update in updates], again=False, needs_proximal=False)
        for index, update in enumerate(updates):
            trained = [t for i in update.order for t in scored(batch[i])]
            tokens = sum(len(t.response_token_ids) for t in trained)
            rank.accumulate(index, spec, normalizer(spec.reduction, len(trained), tokens, 16))
            if first:
                gradient, first = whole_gradient(rank), False
            rank.apply(learner.lr)
    return gradient, torch.cat([tensor.flatten().clone() for _, tensor in rank.weights()])


def whole_gradient(rank: Rank) -> Tensor:
    if isinstance(rank.backend, DeepSpeedBackend):
        from deepspeed.utils import safe_get_full_grad

        return torch.cat([safe_get_full_grad(p).flatten().clone() for p in rank.policy.model.parameters()])
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in rank.policy.model.parameters()]
    return torch.cat([gradient.flatten().clone() for gradient in found])


def work(number: int, ranks: int, backend: str, folder: Path, port: int, answers: multiprocessing.Queue) -> None:
    try:
        found = []
        for objective, groups, updates in CASES:
            config = configured(folder, objective, updates, ranks=ranks, backend=backend)
            if not torch.distributed.is_initialized():
                enter(config, number, TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False))
            found.append([tensor.numpy() for tensor in train(config, groups, number)])
        answers.put((number, found if number == 0 else None))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception:
        answers.put((number, traceback.format_exc()))


def in_processes(ranks: int, backend: str, folder: Path) -> list[list[Tensor]]:
    """What rank 0 of so many real processes found in every case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A server that has imported everything makes each of them in a moment.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["counterflow.learner.ranks"])
    answers = context.Queue()
    processes = [
        context.Process(target=work, args=(number, ranks, backend, folder, port, answers), daemon=True)
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(next_answer(answers, processes) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=20)
            if process.is_alive():
                process.terminate()
    failed = {number: told for number, told in found.items() if isinstance(told, str)}
    assert not failed, "\n".join(failed.values())
    return [[torch.from_numpy(array) for array in case] for case in found[0]]


def next_answer(answers: multiprocessing.Queue, processes: list[Any]) -> tuple[int, Any]:
    while True:
        try:
            return answers.get(timeout=2)
        except queue.Empty:
            dead = [p.exitcode for p in processes if p.exitcode]
            assert not dead, f"a rank ended with exit code {dead[0]}, with no answer"


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
    for (gradient, weights), (expected, target) in zip(in_processes(ranks, backend, tiny_model), alone, strict=True):
        assert (gradient - expected).norm() <= 1e-5 * expected.norm() > 0
        moved = (target - start).norm()
        assert (weights - target).norm() <= 1e-3 * moved
