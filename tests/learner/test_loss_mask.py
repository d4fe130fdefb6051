"""Tokens that a loss mask takes out are not trained, not counted, and may carry any behaviour log-prob."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import numpy as np
import torch
from groups import make_group

from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.trajectory import Group, Origin
from counterflow.configs.schema import RunConfig
from counterflow.learner.learner import Learner
from counterflow.records import StepRecord

MASK = np.array([True, False, True, True, False])


def masked(group: Group, behavior_logprob: float) -> Group:
    """The group with `MASK`, and this behaviour log-prob at the tokens that it takes out."""
    trajectories = tuple(
        dataclasses.replace(
            t,
            loss_mask=MASK,
            behavior_logprobs=np.where(MASK, t.behavior_logprobs, behavior_logprob).astype(np.float32),
        )
        for t in group.trajectories
    )
    return dataclasses.replace(group, trajectories=trajectories)


def step_on(
    group: Group, server: Address, origin: Origin, folder: Path, model: Path
) -> tuple[StepRecord, torch.Tensor]:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 1},
            "learner": {"lr": 1e-3},
            "run": {"step_timeout_s": 20},
            "objective": {"reduction": "token_mean"},
        }
    )

    async def offer() -> None:
        producer = Producer(server, origin.run_id, capacity=Capacity(9, 1 << 30, 1), lease_s=60, attempts=1)
        await producer.admit(1, wanted=1)
        await producer.add(group, encode(group, origin.schema()))
        await producer.close()

    asyncio.run(offer())
    learner = Learner(folder, config, server, origin, time.time(), cores=None)
    try:
        record = learner.step().record
        return record, torch.cat([p.detach().flatten() for p in learner._trainer.policy.model.parameters()])
    finally:
        learner.close()


def test_masked_token_is_trained_or_counted(server: Address, origin: Origin, tmp_path: Path, tiny_model: Path) -> None:
    found = []
    for name, logprob in (("a", -0.5), ("b", -90.0)):
        own = dataclasses.replace(origin, run_id=f"{origin.run_id}-{name}")
        group = masked(make_group(tokens=len(MASK)), logprob)
        found.append(step_on(group, server, own, tmp_path / name, tiny_model))
    (first, weights), (second, other_weights) = found
    assert first.tokens == second.tokens == 2 * MASK.sum()
    assert first.lag_histogram == [2 * MASK.sum()]
    assert (first.loss, first.grad_norm, first.entropy) == (second.loss, second.grad_norm, second.entropy)
    assert torch.equal(weights, other_weights) and first.grad_norm > 0
