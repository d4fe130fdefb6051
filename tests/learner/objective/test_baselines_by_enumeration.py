"""Baselines leave the mean gradient where it is: all ordered groups of two sequences, each weighted by its chance."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from counterflow.learner.objective.audit import catalogue, moments, pair_moments
from counterflow.learner.objective.loss import token_losses
from counterflow.learner.objective.rows import classify, refusal
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.tables import random_tables
from counterflow.learner.objective.types import PolicyBatch

BETA = 0.3
EXACT = {
    "sequence": ObjectiveSpec(beta=BETA, correction="importance", level="sequence", reward_to_go=False),
    "sequence_to_go": ObjectiveSpec(beta=BETA, correction="importance", level="sequence"),
    "per_decision": ObjectiveSpec(
        beta=BETA, correction="importance", level="sequence", reward_weight="per_decision", reward_to_go=True
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
        proximal_logprobs=tables.logprobs(tables.pi)[order],
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


@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize("name", EXACT)
def test_group_mean_is_biased_by_the_factor_that_its_name_tells(name, eos):
    """In groups of 2, `(1 - 1/G) X + Y` is X / 2 + Y: proportional to the KL's gradient with nothing in the loss."""
    tables = random_tables(3, 2, seed=1, drift=0.6, distance=None, eos=eos)
    fields = tables.fields()
    spec = dataclasses.replace(EXACT[name], advantage="group_mean")
    row = classify(spec)
    form = {
        "k3_both": ("(1 - 1/G) (G - F_pi) + F_pi", (fields["G"] + fields["F_pi"]) / 2),
        "rao_blackwell": ("(1 - 1/G) (G - R_pi) + R_pi", (fields["G"] + fields["R_pi"]) / 2),
    }
    expected, gradient = form.get(name, ("(1 - 1/G) G", fields["G"] / 2))
    assert (row.expected, row.biased, row.combination) == (expected, True, None)
    assert "group mean" in row.why
    assert (refusal(row) or "").count("advantage rloo") == 1
    found = group_gradients(tables, torch.zeros(len(tables.responses), dtype=torch.float64), spec)
    torch.testing.assert_close(found, -BETA * gradient, atol=1e-9, rtol=0)
    audited = pair_moments(tables, spec).mean
    torch.testing.assert_close(audited, BETA * gradient, atol=1e-9, rtol=0)
    in_loss = dataclasses.replace(catalogue(2.0)["off_16"], advantage="group_mean")
    assert not classify(in_loss).biased


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


BIASED = {
    "default": {},
    "none": {"correction": "none"},
    "ppo": {"correction": "ppo"},
    "gspo": {"correction": "gspo"},
    "cispo": {"correction": "cispo"},
    "topr": {"correction": "topr"},
    "m2po": {"correction": "m2po"},
    "decoupled_ppo": {"correction": "decoupled_ppo", "cap": 1.2},
    "group_std": {"correction": "none", "advantage": "group_std"},
    "both": {"estimator": "k3", "placement": "both", "reward_weight": "token", "loss_weight": "token", "kl_cap": 1.1},
}


@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize("name", BIASED)
def test_the_baseline_of_a_biased_choice_is_part_of_what_is_audited(name, eos):
    """Where E_mu[w_t g_t] is not 0 a baseline moves the mean: one response alone is then another objective."""
    tables = random_tables(3, 2, seed=4, drift=0.6, distance=None, eos=eos)
    spec = ObjectiveSpec(beta=BETA, **BIASED[name])
    found = pair_moments(tables, spec).mean
    expected = -group_gradients(tables, torch.zeros(len(tables.responses), dtype=torch.float64), spec)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    if name in ("none", "ppo", "gspo", "cispo"):
        assert (found - moments(tables, spec).mean).norm() > 0.02 * found.norm()


@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize("on_policy", [False, True])
def test_pairs_without_a_baseline_are_two_single_responses(on_policy, eos):
    tables = random_tables(3, 2, seed=4, drift=0.6, distance=None, eos=eos)
    for options in ({}, {"estimator": "rao_blackwell", "placement": "both", "loss_weight": "prefix"}):
        spec = ObjectiveSpec(beta=BETA, advantage="plain", baseline=7.0, **options)
        pair, single = pair_moments(tables, spec, on_policy), moments(tables, spec, on_policy)
        torch.testing.assert_close(pair.mean, single.mean, atol=1e-12, rtol=0)
        assert pair.variance == pytest.approx(single.variance, rel=1e-9)
