"""How much a token counts in the loss: what its gradient says, for every correction and reduction."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from test_corrections import make_batch

from counterflow.learner.objective.advantage import advantages
from counterflow.learner.objective.loss import token_losses, token_weights
from counterflow.learner.objective.spec import Correction, ObjectiveSpec, Reduction
from counterflow.learner.objective.types import PolicyBatch


@pytest.mark.parametrize("reduction", get_args(Reduction))
@pytest.mark.parametrize("correction", get_args(Correction))
def test_weight_is_not_that_of_the_gradient(correction: Correction, reduction: Reduction) -> None:
    batch = make_batch(seed=2)
    spec = ObjectiveSpec(beta=0.0, correction=correction, reduction=reduction)
    (gradient,) = torch.autograd.grad(token_losses(batch, spec).sum(), batch.logprobs)
    weights = token_weights(batch, spec)
    torch.testing.assert_close(weights * advantages(batch, spec).abs(), gradient.abs())
    assert not weights.requires_grad and (weights >= 0).all()
    assert (weights[~batch.loss_mask] == 0).all()


def test_numbers_worked_by_hand_come_out_otherwise() -> None:
    """Ratios 1, 4 and 1/2 in one sequence, a masked token and a ratio of 1 in the other; the cap is 2."""
    ratios = torch.tensor([1.0, 4.0, 0.5, 9.0, 1.0], dtype=torch.float64)
    batch = PolicyBatch(
        logprobs=ratios.log() - 3,
        behavior_logprobs=torch.full_like(ratios, -3),
        reference_logprobs=None,
        proximal_logprobs=None,
        loss_mask=torch.tensor([True, True, True, False, True]),
        sequence=torch.tensor([0, 0, 0, 1, 1]),
        rewards=torch.tensor([0.0, 1.0], dtype=torch.float64),
        group=torch.tensor([0, 0]),
    )
    for reduction in ("constant", "token_mean"):
        found = token_weights(batch, ObjectiveSpec(beta=0.0, cap=2.0, reduction=reduction))
        assert found.tolist() == pytest.approx([1, 2, 0.5, 0, 1])
    found = token_weights(batch, ObjectiveSpec(beta=0.0, cap=2.0, reduction="sequence_mean"))
    assert found.tolist() == pytest.approx([1 / 3, 2 / 3, 1 / 6, 0, 1])
    cut = token_weights(batch, ObjectiveSpec(beta=0.0, correction="masked", floor=0.6, cap=2.0))
    assert cut.tolist() == pytest.approx([1, 0, 0, 0, 1])
