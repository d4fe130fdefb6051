"""One step on the chain of kl_v2t2.json, as the learner takes it: every sequence as often as mu samples it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from counterflow.learner.objective.diagnostics import diagnose
from counterflow.learner.objective.loss import policy_loss
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.tables import Tables
from counterflow.learner.objective.types import PolicyBatch

GOLDEN = json.loads((Path(__file__).parent / "kl_v2t2.json").read_text())
EXACT = ObjectiveSpec(beta=1.0, level="sequence", cap=math.inf, reward_to_go=False)


def chain(mu="mu"):
    """Column 1 of a gradient is the gradient in the chain's three logits."""

    def logits(name):
        p = torch.tensor(GOLDEN[name], dtype=torch.float64)
        return torch.stack([torch.zeros_like(p), torch.logit(p)], dim=1)

    return Tables(2, 2, logits("pi"), logits(mu), logits("ref"))


def replicated(tables, theta, count):
    """One group of `count` sequences, in the exact proportions of mu."""
    copies = (tables.probabilities(tables.mu) * count).round().long()
    owners = tables.places[2]
    choice = torch.arange(4).repeat_interleave(copies)
    tokens = torch.cat([(owners == number).nonzero().flatten() for number in choice])
    return PolicyBatch(
        logprobs=tables.logprobs(theta)[tokens],
        behavior_logprobs=tables.logprobs(tables.mu)[tokens],
        reference_logprobs=tables.logprobs(tables.ref)[tokens],
        proximal_logprobs=None,
        loss_mask=torch.ones(2 * count, dtype=torch.bool),
        sequence=torch.arange(count).repeat_interleave(2),
        rewards=torch.zeros(count, dtype=torch.float64),
        group=torch.zeros(count, dtype=torch.int64),
    )


def test_policy_loss_as_called_by_the_learner_gives_the_golden_gradient():
    tables = chain()
    theta = tables.pi.clone().requires_grad_()
    policy_loss(replicated(tables, theta, 200), EXACT, 200).backward()
    # Leaving itself out of the baseline stretches each advantage by n / (n - 1).
    torch.testing.assert_close((theta.grad[:, 1] * 199 / 200).tolist(), GOLDEN["gradients"]["G"], atol=6e-9, rtol=0)


def test_diagnostics_are_the_golden_numbers():
    tables = chain()
    found = diagnose(replicated(tables, tables.pi, 200), ObjectiveSpec(beta=1.0, level="sequence", cap=1.5))
    assert found.ess_sequence == pytest.approx(GOLDEN["ess_over_n"], abs=1e-8)
    assert 1 / found.ess_sequence - 1 == pytest.approx(GOLDEN["chi2_seq"], abs=1e-8)
    # KL(mu || pi) over sequences is twice that per token.
    assert 2 * found.kl_behavior_k1 == pytest.approx(GOLDEN["kl_mu_pi"], abs=1e-9)
    assert 2 * found.kl_behavior_k3 == pytest.approx(GOLDEN["kl_mu_pi"], abs=1e-9)
    assert found.truncated_weights == pytest.approx(63 / 200)


def test_diagnosed_kl_to_the_reference_is_exact_on_policy():
    tables = chain(mu="pi")
    found = diagnose(replicated(tables, tables.pi, 100), EXACT)
    assert 2 * found.kl_reference == pytest.approx(GOLDEN["kl_pi_ref"], abs=1e-9)
    assert (found.kl_behavior_k1, found.chi2, found.ess_token, found.ess_sequence) == pytest.approx((0, 0, 1, 1))
