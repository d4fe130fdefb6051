"""How far apart the policies are, from one step's tokens: plain floats, measured in float64 and without gradient.

Feed it the whole step at once (`concatenate`): effective sample sizes of microbatches do not average.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .advantage import zero_signal
from .importance import log_ratios, sequence_log_ratios
from .kl import k3
from .types import Diagnostics, ObjectiveSpec, PolicyBatch

LARGEST_EXPONENT = 700.0
"""exp of it is finite in float64."""


def effective_share(log_weights: Tensor) -> Tensor:
    """ESS / N = (sum w)^2 / (N sum w^2) of log-weights [N], formed in logs so that it never overflows; 1 for N = 0."""
    count = log_weights.shape[0]
    if count == 0:
        return log_weights.new_ones(())
    return torch.exp(2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0) - math.log(count))


def mean_or_zero(values: Tensor) -> Tensor:
    """Mean of [n], 0 for n = 0."""
    return values.sum() / max(values.shape[0], 1)


@torch.no_grad()
def diagnose(batch: PolicyBatch, spec: ObjectiveSpec) -> Diagnostics:
    """Distances between mu, pi and ref over the tokens of the mask, and what truncation and rewards look like.

    Means are over tokens as mu sampled them, unweighted. So k3 against ref is unbiased for KL(pi || ref) per token
    only on-policy; it is never negative, and it is not the estimator that the gradient uses.
    """
    by_token = log_ratios(batch).double()[batch.loss_mask]
    by_sequence = sequence_log_ratios(batch).double()
    ratio = by_token.clamp(max=LARGEST_EXPONENT / 2).exp()
    if batch.reference_logprobs is None:
        kl_reference = torch.full_like(ratio.sum(), math.nan)
    else:
        kl_reference = mean_or_zero(
            k3(batch.logprobs.double(), batch.reference_logprobs.double(), batch.loss_mask)[batch.loss_mask]
        )
    if spec.correction == "none":
        truncated_weights = torch.zeros_like(ratio.sum())
    else:
        log_weights = by_token if spec.level == "token" else by_sequence
        truncated_weights = mean_or_zero((log_weights > math.log(spec.cap)).double())
    measured = torch.stack(
        [
            kl_reference,
            mean_or_zero(-by_token),
            mean_or_zero(ratio - 1 - by_token),
            effective_share(by_token),
            effective_share(by_sequence),
            mean_or_zero(ratio.square() - 1),
            truncated_weights,
            mean_or_zero(zero_signal(batch.rewards, batch.group).double()),
        ]
    )
    return Diagnostics(*measured.tolist())
