"""Baselines leave the mean gradient where it is: all ordered groups of two sequences, each weighted by its chance."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from counterflow.learner.objective import ObjectiveSpec, PolicyBatch, token_losses
from counterflow.learner.objective.tables import random_tables

BETA = 0.3
EXACT = {
    "sequence": ObjectiveSpec(beta=BETA, correction="importance", level="sequence"),
    "sequence_to_go": ObjectiveSpec(beta=BETA, correction="importance", level="sequence", kl_return="to_go"),
    "per_decision": ObjectiveSpec(
        beta=BETA, correction="importance", level="sequence", reward_weight="per_decision", kl_return="to_go"
    ),
    "k3_both": ObjectiveSpec(
        beta=BETA,
        estimator="k3",
        placement="both",
        correction="importance",
        level="sequence",
        loss_weight="prefix",
        differentiate_weight=False,
    ),
    "rao_blackwell": ObjectiveSpec(
        beta=BETA,
        estimator="rao_blackwell",
        placement="both",
        correction="importance",
        level="sequence",
        reward_weight="per_decision",
        loss_weight="prefix",
        differentiate_weight=False,
    ),
}


def group_gradients(tables, rewards, spec):
    """Expected gradient of half a group of two, float64 [contexts, V]."""
    theta = tables.pi.clone().requires_grad_()
    rows, _, owners = tables.places
    tokens = [(owners == n).nonzero().flatten() for n in range(len(tables.responses))]
    pairs = list(itertools.product(range(len(tokens)), repeat=2))
    order = torch.cat([tokens[n] for pair in pairs for n in pair])
    drawn = torch.tensor([n for pair in pairs for n in pair])
    lengths = torch.tensor([len(tokens[n]) for n in drawn])
    batch = PolicyBatch(
        logprobs=tables.logprobs(theta)[order],
        behavior_logprobs=tables.logprobs(tables.mu)[order],
        reference_logprobs=tables.logprobs(tables.ref)[order],
        proximal_logprobs=None,
        loss_mask=torch.ones(len(order), dtype=torch.bool),
        sequence=torch.arange(len(drawn)).repeat_interleave(lengths),
        rewards=rewards[drawn],
        group=torch.arange(len(pairs)).repeat_interleave(2),
        reference_divergence=tables.state_kl(theta, tables.ref)[rows[order]],
    )
    chance = tables.probabilities(tables.mu)[torch.tensor(pairs)].prod(1)[batch.group][batch.sequence]
    (token_losses(batch, spec) * chance).sum().backward()
    return -theta.grad / 2


def parts(tables, rewards):
    """grad E_pi[R] and grad KL(pi || ref)."""
    theta = tables.pi.clone().requires_grad_()
    (task,) = torch.autograd.grad(tables.probabilities(theta) @ rewards, theta)
    return task, tables.fields()["G"]


@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize("name", EXACT)
def test_leave_one_out_leaves_the_objectives_gradient_exact(name, eos):
    tables = random_tables(3, 2, seed=1, drift=0.6, distance=None, eos=eos)
    rewards = torch.randn(len(tables.responses), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    task, kl = parts(tables, rewards)
    found = group_gradients(tables, rewards, EXACT[name])
    torch.testing.assert_close(found, task - BETA * kl, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["sequence", "sequence_to_go", "per_decision"])
def test_group_mean_shrinks_reward_and_kl_alike(name):
    tables = random_tables(3, 2, seed=1, drift=0.6, distance=None)
    rewards = torch.arange(9, dtype=torch.float64)
    task, kl = parts(tables, rewards)
    spec = dataclasses.replace(EXACT[name], advantage="group_mean")
    found = group_gradients(tables, rewards, spec)
    torch.testing.assert_close(found, (task - BETA * kl) / 2, atol=1e-9, rtol=0)


def test_std_adds_the_kl_term_whole():
    tables = random_tables(2, 2, seed=3, drift=0.6, distance=None)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    _, kl = parts(tables, rewards)
    spec = dataclasses.replace(EXACT["sequence"], advantage="group_std")
    without = dataclasses.replace(spec, beta=0.0)
    added = group_gradients(tables, rewards, spec) - group_gradients(tables, rewards, without)
    torch.testing.assert_close(added, -BETA * kl, atol=1e-9, rtol=0)
    equal = group_gradients(tables, torch.ones(4, dtype=torch.float64), spec)
    torch.testing.assert_close(equal, -BETA * kl, atol=1e-9, rtol=0)
