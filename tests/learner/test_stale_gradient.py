"""The gradient of a token, through the learner's loss, is its share of what it would be without a policy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from counterflow.learner.objective.loss import normalizer, policy_loss, token_weights
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.types import PolicyBatch, concatenate
from counterflow.learner.staleness import Policy, Rule, shares

LAGS = (np.array([4, 4, 2, 1]), np.array([2, 2, 2]))
BY_HAND: dict[Policy, list[float]] = {
    "wait": [1, 1, 1, 1, 1, 1, 1],
    "mask_tokens": [0, 0, 1, 1, 1, 1, 1],
    "withhold_keep_baseline": [0, 0, 0, 0, 1, 1, 1],
    "downweight": [0.25, 0.25, 1, 1, 1, 1, 1],
}
SPECS = [
    ObjectiveSpec(beta=0.0, correction="none"),
    ObjectiveSpec(beta=0.1, correction="truncated", level="sequence"),
    ObjectiveSpec(beta=0.1, correction="ppo", estimator="k3", placement="both", reduction="sequence_mean"),
    ObjectiveSpec(beta=0.1, reward_weight="per_decision", advantage="group_mean", reduction="token_mean"),
]


def batch(logprobs: Tensor, share: Tensor | None) -> PolicyBatch:
    """Two responses of one prompt, of rewards 1 and 0."""
    return PolicyBatch(
        logprobs=logprobs,
        behavior_logprobs=torch.linspace(-1.3, -0.7, 7, dtype=torch.float64),
        reference_logprobs=torch.linspace(-0.8, -1.1, 7, dtype=torch.float64),
        proximal_logprobs=None,
        loss_mask=torch.ones(7, dtype=torch.bool),
        sequence=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        rewards=torch.tensor([1.0, 0.0]),
        group=torch.zeros(2, dtype=torch.int64),
        share=share,
    )


def gradient(spec: ObjectiveSpec, share: Tensor | None) -> Tensor:
    logprobs = torch.full((7,), -1.0, dtype=torch.float64, requires_grad=True)
    loss = policy_loss(batch(logprobs, share), spec, normalizer(spec.reduction, 2, 7, length_constant=4))
    return torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize("policy", BY_HAND)
@pytest.mark.parametrize("spec", SPECS)
def test_token_has_another_gradient_than_its_share(spec: ObjectiveSpec, policy: Policy) -> None:
    rule = Rule(policy, max_lag=2, decay=0.5)
    share = torch.from_numpy(np.concatenate([shares(lags, np.ones(len(lags), np.bool_), rule) for lags in LAGS]))
    assert share.tolist() == BY_HAND[policy]
    whole = gradient(spec, None)
    assert (whole != 0).all()
    torch.testing.assert_close(gradient(spec, share), whole * share)
    weights, plain = (token_weights(batch(torch.full((7,), -1.0), s), spec) for s in (share, None))
    torch.testing.assert_close(weights, plain * share)


def test_withheld_reward_leaves_the_baseline() -> None:
    """RLOO by hand: the second response, of reward 0 beside a withheld 1, has advantage -1: gradient +1 over 2 x 4."""
    share = torch.tensor(BY_HAND["withhold_keep_baseline"])
    assert gradient(SPECS[0], share).tolist() == [0, 0, 0, 0, 0.125, 0.125, 0.125]


def test_share_is_lost_where_microbatches_are_joined() -> None:
    one = batch(torch.zeros(7), torch.tensor(BY_HAND["downweight"]))
    whole = concatenate([one, dataclasses.replace(one, share=torch.ones(7))])
    assert whole.share is not None and whole.share.tolist() == [*BY_HAND["downweight"], *[1.0] * 7]
