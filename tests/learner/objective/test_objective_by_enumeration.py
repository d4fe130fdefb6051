"""The production loss against closed forms: every sequence of a toy, weighted by its probability under mu."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from counterflow.learner.objective import (
    ObjectiveSpec,
    diagnose,
    importance_weights,
    policy_loss,
    shaped_rewards,
    sum_before,
    token_losses,
    token_penalties,
)

GOLDEN = json.loads((Path(__file__).parent / "kl_v2t2.json").read_text())
EXACT = ObjectiveSpec(beta=1.0, correction="truncated", level="sequence", cap=math.inf)
UNCAPPED_TOKENS = ObjectiveSpec(beta=1.0, correction="truncated", level="token", cap=math.inf)
SIZES = [(2, 1), (2, 4), (3, 1), (3, 3), (4, 2), (4, 4)]


def whole_return(spec):
    """R'_i at each token, without a baseline."""
    return lambda batch: shaped_rewards(batch, spec)[batch.sequence]


def return_to_go(spec):
    """R_i - beta sum_{n >= t} k1_n at each token, without a baseline."""

    def advantage(batch):
        penalties = token_penalties(batch, spec)
        return whole_return(spec)(batch) + sum_before(penalties, batch.sequence, batch.sequences)

    return advantage


def random_rewards(toy, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(toy.responses), dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(
    ("spec", "advantage", "row"),
    [
        (EXACT, whole_return, "G"),
        (EXACT, return_to_go, "G"),
        (UNCAPPED_TOKENS, whole_return, "off_3_k1_reward_token_rtg"),
        (UNCAPPED_TOKENS, return_to_go, "off_3_k1_reward_token_rtg"),
        (ObjectiveSpec(beta=1.0, correction="none"), return_to_go, "off_4_k1_reward_no_is"),
        (ObjectiveSpec(beta=1.0, correction="truncated", level="sequence", cap=1.2), whole_return, "off_6_tis_1.2"),
    ],
)
def test_kl_gradient_is_the_golden_row(golden_toy, spec, advantage, row):
    gradient = golden_toy.expected_gradient(spec, torch.zeros(4, dtype=torch.float64), advantage(spec))
    # The golden numbers are printed with 8 decimals.
    torch.testing.assert_close(gradient[:, 1].tolist(), GOLDEN["gradients"][row], atol=6e-9, rtol=0)


@pytest.mark.parametrize("advantage", [whole_return, return_to_go])
@pytest.mark.parametrize(("vocabulary", "length"), SIZES)
def test_sequence_weights_give_the_true_gradient_off_policy(make_toy, vocabulary, length, advantage):
    toy = make_toy(vocabulary, length)
    rewards = random_rewards(toy)
    spec = ObjectiveSpec(beta=0.3, correction="truncated", level="sequence", cap=math.inf)
    gradient = toy.expected_gradient(spec, rewards, advantage(spec))
    torch.testing.assert_close(-gradient, toy.true_gradient(0.3, rewards), atol=1e-9, rtol=0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["none", "truncated"])
def test_every_choice_is_exact_on_policy(make_toy, correction, level):
    toy = make_toy(3, 3)
    toy = type(toy)(3, 3, toy.pi, toy.ref, toy.pi)
    rewards = random_rewards(toy)
    spec = ObjectiveSpec(beta=0.3, correction=correction, level=level, cap=1.0)
    gradient = toy.expected_gradient(spec, rewards, whole_return(spec))
    torch.testing.assert_close(-gradient, toy.true_gradient(0.3, rewards), atol=1e-9, rtol=0)


def test_levels_differ_only_beyond_one_token(make_toy):
    def gradients(length):
        toy = make_toy(3, length)
        specs = [ObjectiveSpec(beta=1.0, level=level, cap=1.5) for level in ("token", "sequence")]
        return [toy.expected_gradient(s, random_rewards(toy), whole_return(s)) for s in specs]

    torch.testing.assert_close(*gradients(1), atol=1e-12, rtol=0)
    token, sequence = gradients(2)
    assert (token - sequence).abs().max() > 1e-3


def test_bias_of_truncation_vanishes_as_the_cap_grows(make_toy):
    toy = make_toy(3, 3)
    rewards = random_rewards(toy)
    truth = toy.true_gradient(0.3, rewards)

    def error(cap):
        spec = ObjectiveSpec(beta=0.3, level="sequence", cap=cap)
        return (toy.expected_gradient(spec, rewards, whole_return(spec)) + truth).norm().item()

    errors = [error(cap) for cap in (1.0, 4.0, 16.0, 1e6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.01
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("kl_return", ["whole", "to_go"])
@pytest.mark.parametrize(("vocabulary", "length"), [(2, 1), (2, 2), (3, 2)])
def test_leave_one_out_baseline_adds_no_bias(make_toy, vocabulary, length, kl_return):
    """All ordered pairs of sequences as groups of two, each weighted by mu(y) mu(y')."""
    toy = make_toy(vocabulary, length)
    rewards = random_rewards(toy)
    spec = ObjectiveSpec(beta=0.3, level="sequence", cap=math.inf, kl_return=kl_return)
    pairs = torch.tensor(list(itertools.product(range(len(toy.responses)), repeat=2)))
    group = torch.arange(len(pairs)).repeat_interleave(2)
    theta = toy.pi.clone().requires_grad_()
    batch = toy.batch(theta, pairs.flatten(), group, rewards)
    chance = toy.probabilities(toy.mu)[pairs].prod(1)[group][batch.sequence]
    (token_losses(batch, spec) * chance).sum().backward()
    torch.testing.assert_close(-theta.grad / 2, toy.true_gradient(0.3, rewards), atol=1e-9, rtol=0)


def replicated(toy, theta, rewards):
    """200 sequences in the exact proportions of the golden mu (.33, .22, .135, .315), one group."""
    choice = torch.arange(4).repeat_interleave(torch.tensor([66, 44, 27, 63]))
    return toy.batch(theta, choice, torch.zeros(200, dtype=torch.int64), rewards)


def test_policy_loss_as_called_by_the_learner_gives_the_golden_gradient(golden_toy):
    theta = golden_toy.pi.clone().requires_grad_()
    policy_loss(replicated(golden_toy, theta, torch.zeros(4, dtype=torch.float64)), EXACT, 200).backward()
    # Leaving itself out of the baseline stretches each advantage by n / (n - 1).
    torch.testing.assert_close((theta.grad[:, 1] * 199 / 200).tolist(), GOLDEN["gradients"]["G"], atol=6e-9, rtol=0)


def test_diagnostics_are_the_golden_numbers(golden_toy):
    batch = replicated(golden_toy, golden_toy.pi, torch.zeros(4, dtype=torch.float64))
    found = diagnose(batch, ObjectiveSpec(beta=1.0, level="sequence", cap=1.5))
    assert found.ess_sequence == pytest.approx(GOLDEN["ess_over_n"], abs=1e-8)
    assert 1 / found.ess_sequence - 1 == pytest.approx(GOLDEN["chi2_seq"], abs=1e-8)
    # KL(mu || pi) over sequences is twice that per token.
    assert 2 * found.kl_behavior_k1 == pytest.approx(GOLDEN["kl_mu_pi"], abs=1e-9)
    assert 2 * found.kl_behavior_k3 == pytest.approx(GOLDEN["kl_mu_pi"], abs=1e-9)
    assert found.truncated_weights == pytest.approx(63 / 200)


def test_diagnosed_kl_to_the_reference_is_exact_on_policy(golden_toy):
    toy = type(golden_toy)(2, 2, golden_toy.pi, golden_toy.ref, golden_toy.pi)
    choice = torch.arange(4).repeat_interleave((toy.probabilities(toy.pi) * 100).round().long())
    batch = toy.batch(toy.pi, choice, torch.zeros(100, dtype=torch.int64), torch.zeros(4))
    found = diagnose(batch, EXACT)
    assert 2 * found.kl_reference == pytest.approx(GOLDEN["kl_pi_ref"], abs=1e-9)
    assert (found.kl_behavior_k1, found.chi2, found.ess_token, found.ess_sequence) == pytest.approx((0, 0, 1, 1))


def test_weights_average_to_one_under_the_behaviour(golden_toy):
    batch = replicated(golden_toy, golden_toy.pi, torch.zeros(4))
    assert importance_weights(batch, EXACT).mean().item() == pytest.approx(1, abs=1e-12)
