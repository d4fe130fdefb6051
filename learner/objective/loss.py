"""The loss of a batch: a score function with constant weights and advantages, summed over tokens.

A loss is a sum over tokens over a number fixed for the step, so the gradients of microbatches of whole groups add up
to the gradient of the step, whatever the split. Never divides by a length of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .advantage import advantages
from .importance import importance_weights
from .types import ObjectiveSpec, PolicyBatch, at_least_float32


def token_losses(batch: PolicyBatch, spec: ObjectiveSpec, advantage: Tensor | None = None) -> Tensor:
    """l_t = -sg(w_t) sg(A_t) log pi(y_t | s_t): float [tokens], exactly 0 outside the mask.

    `advantage` (float [tokens]) replaces that of the spec: an outer baseline, or none. An infinite or NaN log-prob
    inside the mask gives a loss that is not finite: it is bad data, and it shows.
    """
    if advantage is None:
        advantage = advantages(batch, spec)
    scale = importance_weights(batch, spec) * advantage.detach()
    return -scale * torch.where(batch.loss_mask, at_least_float32(batch.logprobs), 0.0)


def policy_loss(batch: PolicyBatch, spec: ObjectiveSpec, normalizer: float) -> Tensor:
    """L = sum_t l_t / normalizer: a scalar to minimise; -grad L estimates grad (E[R] - beta KL(pi || ref)), scaled.

    `normalizer` is the sequences of the whole step times the length constant, the same for all its microbatches.
    """
    if not (normalizer > 0 and math.isfinite(normalizer)):
        raise ValueError(f"normalizer is {normalizer}; pass the sequences of the step times the length constant")
    return token_losses(batch, spec).sum() / normalizer
