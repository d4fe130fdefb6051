"""Each importance correction against its textbook formula, one token at a time; and what weights must average to."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.learner.objective.diagnostics import diagnose
from counterflow.learner.objective.importance import correct
from counterflow.learner.objective.loss import normalizer, policy_loss, token_losses
from counterflow.learner.objective.ratios import (
    effective_sample_share,
    learning_rate_scale,
    log_weights,
    sequence_log_ratios,
)
from counterflow.learner.objective.segments import sum_segments
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.strength import adaptive_beta, linear_beta
from counterflow.learner.objective.tables import random_tables
from counterflow.learner.objective.types import PolicyBatch

LENGTHS = (4, 0, 3, 5, 2, 6)
GROUPS = (0, 0, 0, 1, 1, 1)


def make_batch(seed=0, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)
    logprobs = -3 * torch.rand(tokens, dtype=torch.float64, generator=generator) - 0.1
    noise, ahead = torch.randn(2, tokens, dtype=torch.float64, generator=generator)
    return PolicyBatch(
        logprobs=logprobs.requires_grad_(),
        behavior_logprobs=logprobs.detach() + spread * noise,
        reference_logprobs=None,
        proximal_logprobs=logprobs.detach() + 0.3 * ahead,
        loss_mask=torch.arange(tokens) % 7 != 3,
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
        rewards=torch.tensor([1.0, 0.0, 0.3, -1.0, 0.5, 2.0], dtype=torch.float64),
        group=torch.tensor(GROUPS),
    )


def textbook(batch, spec, advantage):
    """The surrogate objective as papers write it, summed over tokens, by loops and autograd."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = torch.arange(batch.logprobs.shape[0])
    low, high = 1 - spec.clip_low, 1 + spec.clip_high

    def clipped(ratio, a):
        return torch.minimum(ratio * a, ratio.clamp(low, high) * a)

    for number in range(batch.sequences):
        own = [int(t) for t in tokens[(batch.sequence == number) & batch.loss_mask]]
        log_rho = {t: batch.logprobs[t] - batch.behavior_logprobs[t] for t in own}
        log_w = sum((log_rho[t].detach() for t in own), torch.zeros((), dtype=torch.float64))
        for place, t in enumerate(own):
            a, rho = advantage[t], log_rho[t].exp()
            score, sg = batch.logprobs[t], rho.detach()
            if spec.correction == "ppo":
                total = total + clipped(rho, a)
            elif spec.correction == "decoupled_ppo":
                behind = (batch.proximal_logprobs[t] - batch.behavior_logprobs[t]).exp().clamp(max=spec.cap)
                total = total + behind * clipped((batch.logprobs[t] - batch.proximal_logprobs[t]).exp(), a)
            elif spec.correction == "cispo":
                total = total + sg.clamp(low, high) * a * score
            elif spec.correction == "gspo":
                ratio = (log_w / len(own)).exp() * (score - score.detach()).exp()
                total = total + clipped(ratio, a)
            elif spec.correction == "topr":
                total = total + (1.0 if a >= 0 else log_w.exp().clamp(max=spec.cap)) * a * score
            elif spec.correction == "sequence_mask":
                kept = not (a < 0 and -log_w / len(own) > spec.divergence)
                total = total + kept * clipped(rho, a)
            elif spec.correction == "vtrace":
                later = math.prod(log_rho[n].detach().exp().clamp(max=spec.trace_cap).item() for n in own[place + 1 :])
                total = total + sg.clamp(max=spec.cap) * later * a * score
            elif spec.correction == "masked":
                level = {
                    "token": log_rho[t].detach(),
                    "prefix": sum(log_rho[n].detach() for n in own[: place + 1]),
                    "sequence": log_w,
                    "geometric": log_w / len(own),
                }[spec.level].exp()
                total = total + (level * a * score if spec.floor <= level <= spec.cap else 0.0)
            elif spec.correction == "m2po":
                kept = second_moment_kept(batch, spec.second_moment)
                total = total + (rho * a if t in kept else 0.0)
    return total


def second_moment_kept(batch, limit):
    kept = set()
    moment = (batch.logprobs - batch.behavior_logprobs).detach().square()
    for group in set(GROUPS):
        tokens = (batch.loss_mask & (batch.group[batch.sequence] == group)).nonzero().flatten().tolist()
        tokens.sort(key=lambda t: moment[t].item())
        while tokens and sum(moment[t].item() for t in tokens) / len(tokens) > limit:
            tokens.pop()
        kept |= set(tokens)
    return kept


CHOICES = [
    *(ObjectiveSpec(beta=0, correction=name, cap=1.4) for name in ("ppo", "decoupled_ppo", "cispo", "gspo", "topr")),
    ObjectiveSpec(beta=0, correction="sequence_mask"),
    ObjectiveSpec(beta=0, correction="vtrace", cap=1.5, trace_cap=1.1),
    ObjectiveSpec(beta=0, correction="m2po", second_moment=0.1),
    *(ObjectiveSpec(beta=0, correction="masked", level=lvl) for lvl in ("token", "prefix", "sequence", "geometric")),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spec", CHOICES, ids=lambda spec: f"{spec.correction}-{spec.level}")
def test_gradient_is_the_textbooks(spec, seed):
    rewards = torch.randn(len(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    batch = dataclasses.replace(make_batch(seed), rewards=rewards)
    spec = dataclasses.replace(spec, advantage="plain")
    advantage = rewards[batch.sequence]
    (expected,) = torch.autograd.grad(textbook(batch, spec, advantage), batch.logprobs)
    (found,) = torch.autograd.grad(token_losses(batch, spec).sum(), batch.logprobs)
    torch.testing.assert_close(-found, expected, atol=1e-12, rtol=0)
    weight, changed = correct(batch, spec, advantage)
    assert not changed[~batch.loss_mask].any()
    assert (weight[batch.loss_mask & ~changed] > 0).all()


def test_sequence_mask_drops_only_negative_sequences_that_pi_left():
    batch = make_batch(spread=0.0)
    behavior = batch.behavior_logprobs + 0.2
    batch = dataclasses.replace(batch, behavior_logprobs=behavior)
    advantage = torch.where(batch.sequence % 2 == 0, -1.0, 1.0)
    spec = ObjectiveSpec(beta=0, correction="sequence_mask", divergence=0.1)
    dropped = correct(batch, spec, advantage).weight == 0
    assert torch.equal(dropped, (advantage < 0) | ~batch.loss_mask)
    kept = correct(batch, dataclasses.replace(spec, divergence=0.3), advantage)
    assert torch.equal(kept.weight == 0, ~batch.loss_mask)


def test_proximal_policy_is_read_by_the_method_that_needs_it_only():
    batch = dataclasses.replace(make_batch(), proximal_logprobs=None)
    for spec in CHOICES:
        if spec.needs_proximal:
            with pytest.raises(ValueError, match="proximal_logprobs"):
                token_losses(batch, spec)
        else:
            assert token_losses(batch, spec).isfinite().all()
    assert [spec.correction for spec in CHOICES if spec.needs_proximal] == ["decoupled_ppo"]


@settings(max_examples=30)
@given(
    vocabulary=st.integers(2, 4),
    length=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    drift=st.floats(0, 2),
    eos=st.sampled_from([None, 0]),
)
def test_running_weights_average_to_one_under_the_behaviour(vocabulary, length, seed, drift, eos):
    """E_mu[W_<=t] = 1 for every t; a sequence that has ended keeps its last weight."""
    tables = random_tables(vocabulary, length, seed, drift, None, eos)
    batch = tables.batch(tables.logprobs(tables.pi), tables.mu)
    chance = tables.probabilities(tables.mu)
    for level in ("prefix", "sequence"):
        weights = log_weights(batch, level).exp()
        for t in range(length):
            at = torch.stack([weights[batch.sequence == n][: t + 1][-1] for n in range(batch.sequences)])
            assert (chance @ at).item() == pytest.approx(1, abs=1e-9)
    conditional = log_weights(batch, "token").exp() * tables.probabilities(tables.mu)[batch.sequence]
    states = torch.zeros(tables.pi.shape[0], dtype=torch.float64).index_add(0, tables.places[0], conditional)
    visits = torch.zeros_like(states).index_add(0, tables.places[0], chance[batch.sequence])
    torch.testing.assert_close(states, visits, atol=1e-9, rtol=1e-9)


def test_effective_sample_share_tends_to_one_over_one_plus_chi2():
    tables = random_tables(3, 3, seed=4, drift=0.4, distance=None)
    batch = tables.batch(tables.logprobs(tables.pi), tables.mu)
    chance = tables.probabilities(tables.mu)
    log_weight = log_weights(batch, "sequence")[:: tables.length]
    chi2 = (chance @ log_weight.exp().square()).item() - 1
    generator = torch.Generator().manual_seed(0)
    errors = []
    for count in (100, 10_000, 1_000_000):
        drawn = torch.multinomial(chance, count, replacement=True, generator=generator)
        errors.append(abs(effective_sample_share(log_weight[drawn]).item() - 1 / (1 + chi2)))
    assert errors[-1] < 1e-3
    assert errors[-1] < errors[0]


def test_weights_of_thirty_thousand_tokens_are_those_of_float64():
    """A float32 sum of as many log-ratios errs in the fifth digit of log W, and on GPUs not twice the same."""
    tokens = 32_768
    generator = torch.Generator().manual_seed(0)
    behavior = -2 * torch.rand(2 * tokens, generator=generator)
    logprobs = behavior + 1e-3 + 1e-2 * torch.randn(2 * tokens, generator=generator)
    batch = PolicyBatch(
        logprobs=logprobs,
        behavior_logprobs=behavior,
        reference_logprobs=None,
        proximal_logprobs=None,
        loss_mask=torch.ones(2 * tokens, dtype=torch.bool),
        sequence=torch.arange(2).repeat_interleave(tokens),
        rewards=torch.zeros(2),
        group=torch.zeros(2, dtype=torch.int64),
    )
    exact = (logprobs - behavior).double().view(2, tokens).sum(1)
    assert torch.equal(sequence_log_ratios(batch), exact.float())
    assert torch.equal(log_weights(batch, "sequence")[::tokens], exact.float())
    assert torch.equal(log_weights(batch, "prefix")[tokens - 1 :: tokens], exact.float())
    torch.testing.assert_close(log_weights(batch, "geometric")[::tokens].double(), exact / tokens, rtol=1e-7, atol=0)


def test_sums_do_not_depend_on_what_stands_beside_a_segment():
    generator = torch.Generator().manual_seed(1)
    values, index = torch.randn(5000, generator=generator), torch.randint(0, 7, (5000,), generator=generator)
    alone = torch.stack([sum_segments(values[index == n], torch.zeros_like(index[index == n]), 1)[0] for n in range(7)])
    assert torch.equal(sum_segments(values, index, 7), alone)
    assert sum_segments(values, index, 9)[7:].eq(0).all()
    counts = sum_segments(torch.ones_like(index), index, 7)
    assert counts.dtype == torch.int64 and torch.equal(counts, torch.bincount(index))


def test_learning_rate_shrinks_with_the_effective_sample():
    batch = make_batch()
    share = diagnose(batch, ObjectiveSpec(beta=0)).ess_sequence
    assert learning_rate_scale(batch) == pytest.approx(math.sqrt(share))
    assert learning_rate_scale(make_batch(spread=0.0)) == pytest.approx(1)
    assert learning_rate_scale(make_batch(spread=2.0)) < learning_rate_scale(make_batch(spread=0.2))


def lagged(lag, correction):
    """Share of tokens cut where mu is `lag` versions behind a learner that moves along a line, one update a batch."""
    spec = ObjectiveSpec(beta=0, correction=correction, cap=1.2, trace_cap=1.2)
    shares = []
    for seed in range(6):
        tables = random_tables(3, 4, seed, drift=0.03 * lag, distance=None)
        batch = tables.batch(tables.logprobs(tables.pi), tables.mu)
        advantage = torch.where(batch.sequence % 2 == 0, 1.0, -1.0).double()
        chance = tables.probabilities(tables.mu)[batch.sequence] / tables.length
        shares.append((chance * correct(batch, spec, advantage).changed).sum().item())
    return sum(shares) / len(shares)


@pytest.mark.parametrize("correction", [spec.correction for spec in CHOICES[:9]] + ["truncated"])
def test_cut_fraction_responds_to_lag(correction):
    """With old log-probs made again under the new weights, the ratio would be 1 at every lag, and nothing cut."""
    shares = [lagged(lag, correction) for lag in (0, 2, 6, 12)]
    assert shares[0] == 0
    assert shares[1] <= shares[2] < shares[3], shares


def test_reductions_divide_as_they_are_named():
    batch = make_batch()
    spec = ObjectiveSpec(beta=0, correction="none", advantage="plain")
    tokens = torch.tensor([int((batch.loss_mask & (batch.sequence == n)).sum()) for n in range(6)])
    weight = batch.rewards[batch.sequence] * batch.loss_mask

    def gradient(reduction, counts):
        chosen = dataclasses.replace(spec, reduction=reduction)
        return torch.autograd.grad(policy_loss(batch, chosen, normalizer(reduction, *counts)), batch.logprobs)[0]

    counts = (6, int(tokens.sum()), 10)
    torch.testing.assert_close(gradient("constant", counts), -weight / 60)
    torch.testing.assert_close(gradient("token_mean", counts), -weight / tokens.sum())
    torch.testing.assert_close(gradient("sequence_mean", counts), -weight / 6 / tokens.clamp(min=1)[batch.sequence])
    assert all(normalizer(reduction, 0, 0, 10) > 0 for reduction in ("constant", "sequence_mean", "token_mean"))


def test_beta_moves_along_its_line_and_towards_its_target():
    assert [linear_beta(step, 0.1, 0.0, 10) for step in (0, 5, 10, 99)] == pytest.approx([0.1, 0.05, 0, 0])
    assert adaptive_beta(0.1, 0.02, 0.01, 10) == pytest.approx(0.1 * 1.02)
    assert adaptive_beta(0.1, 0.0, 0.01, 10) == pytest.approx(0.1 * 0.98)
    assert adaptive_beta(0.1, 0.0101, 0.01, 10) == pytest.approx(0.1 * 1.001)
    assert adaptive_beta(0.1, math.nan, 0.01, 10) == 0.1
    beta, kl = 0.1, 0.05
    for _ in range(2000):
        beta, kl = adaptive_beta(beta, kl, 0.01, 10), 0.002 / beta
    assert kl == pytest.approx(0.01, rel=0.05)


def test_values_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="floor"):
        ObjectiveSpec(beta=0, correction="masked", floor=0.5, cap=0.9)
    with pytest.raises(ValueError, match="clip_low"):
        ObjectiveSpec(beta=0, clip_low=1.5)
    with pytest.raises(ValueError, match="kl_cap"):
        ObjectiveSpec(beta=0, kl_cap=0.0)
    batch = make_batch()
    with pytest.raises(ValueError, match="reference_divergence"):
        token_losses(batch, ObjectiveSpec(beta=0.1, estimator="rao_blackwell"))
