"""Estimators of a token's KL divergence from the reference, from one sample or from the whole vocabulary.

Log-probs go in, one number a token comes out, with the gradient of its own formula. Tokens outside the mask give
exactly 0, in value and in gradient. Sources: Schulman, "Approximating KL divergence"; Amini et al. (2504.10637).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import at_least_float32, largest_exponent, masked_difference
from .spec import ObjectiveSpec
from .types import PolicyBatch


def k1(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k1_t = log pi - log ref: float [tokens]. Unbiased for KL(pi || ref) under pi, of either sign."""
    return masked_difference(logprobs, reference_logprobs, mask)


def k2(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k2_t = k1_t^2 / 2: float [tokens]. Biased in value; its gradient k1_t g_t is that of the per-state reverse KL."""
    return k1(logprobs, reference_logprobs, mask).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3_t = r_t - 1 + k1_t with r_t = ref / pi = exp(-k1_t): float [tokens]. Unbiased under pi, never negative.

    r_t is bounded where it would overflow. The gradient (1 - r_t) g_t is written out, so that a bounded token is
    still pulled to the reference, with the bounded strength; differentiating the bound would leave 1 of it.
    """
    difference = k1(logprobs, reference_logprobs, mask)
    constant = difference.detach()
    excess = torch.expm1(-constant.clamp(min=-largest_exponent(constant.dtype)))
    return excess + constant - excess * (difference - constant)


def token_kl(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """The spec's estimator at each token: float [tokens], differentiable.

    `rao_blackwell` is sum_v pi(v|s_t) log(pi/ref)(v|s_t): it depends on the state s_t only, not on y_t. The gradient of
    its sum over a sequence drawn from pi is sum_t grad KL_t + sum_t g_t sum_{n>t} KL_n: the first in the loss, the
    second by the reward, so that only `both` is the gradient of the sequence's KL.
    """
    if spec.estimator == "rao_blackwell":
        if batch.reference_divergence is None:
            raise ValueError("the rao_blackwell estimator needs PolicyBatch.reference_divergence")
        return torch.where(batch.loss_mask, at_least_float32(batch.reference_divergence), 0.0)
    if batch.reference_logprobs is None:
        raise ValueError(f"beta is {spec.beta} but the batch has no reference_logprobs; compute them, or set beta to 0")
    estimate = {"k1": k1, "k2": k2, "k3": k3}[spec.estimator]
    return estimate(batch.logprobs, batch.reference_logprobs.detach(), batch.loss_mask)
