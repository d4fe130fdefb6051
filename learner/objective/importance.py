"""Importance weights from the behaviour policy mu to the current policy pi, one for each token.

Weights are constants of the loss: they never carry gradient. Ratios are formed as differences of log-probs in float32
or float64, and a log-ratio is bounded before it is exponentiated, so that a weight and its square are finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kl import masked_difference
from .types import ObjectiveSpec, PolicyBatch, sum_segments


def log_ratios(batch: PolicyBatch) -> Tensor:
    """log rho_t = log pi(y_t | s_t) - log mu(y_t | s_t): float [tokens], detached, 0 outside the mask."""
    return masked_difference(batch.logprobs.detach(), batch.behavior_logprobs.detach(), batch.loss_mask)


def sequence_log_ratios(batch: PolicyBatch) -> Tensor:
    """log W = sum_t log rho_t: float [sequences], detached, 0 (W = 1) for a sequence without tokens."""
    return sum_segments(log_ratios(batch), batch.sequence, batch.sequences)


def truncated(log_ratio: Tensor, cap: float) -> Tensor:
    """min(exp(log_ratio), cap), of any shape (truncated importance sampling).

    Even with an infinite cap a weight stays below e^39.9 in float32 (e^319 in float64): its square must be finite.
    """
    bound = 0.45 * math.log(torch.finfo(log_ratio.dtype).max)
    return log_ratio.clamp(max=bound).exp().clamp(max=cap)


def importance_weights(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """The weight of each token: float [tokens], detached, exactly 0 outside the mask.

    `none`: 1. `truncated` by token: min(rho_t, C), a local surrogate whose error grows with the drift of pi from mu.
    `truncated` by sequence: min(W, C), exact as C grows, with a variance that grows with length.
    """
    if spec.correction == "none":
        weights = torch.ones_like(log_ratios(batch))
    elif spec.level == "token":
        weights = truncated(log_ratios(batch), spec.cap)
    else:
        weights = truncated(sequence_log_ratios(batch), spec.cap)[batch.sequence]
    return torch.where(batch.loss_mask, weights, 0.0)
