"""Estimators of a token's KL divergence from one sample (Schulman, "Approximating KL divergence").

Log-probs go in, one number a token comes out. Tokens outside the mask give exactly 0, in value and in gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import at_least_float32


def masked_difference(minuend: Tensor, subtrahend: Tensor, mask: Tensor) -> Tensor:
    """minuend - subtrahend, float [tokens], 0 outside the mask even where an input is infinite or NaN.

    The inputs are replaced before the subtraction, so that no gradient of a masked token is NaN either.
    """
    return torch.where(mask, at_least_float32(minuend), 0.0) - torch.where(mask, at_least_float32(subtrahend), 0.0)


def k1(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k1_t = log pi - log ref: float [tokens]. Unbiased for KL(pi || ref) under pi, of either sign."""
    return masked_difference(logprobs, reference_logprobs, mask)


def k3(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3_t = r_t - 1 + k1_t with r_t = ref / pi = exp(-k1_t): float [tokens]. Unbiased under pi, never negative."""
    difference = k1(logprobs, reference_logprobs, mask)
    return torch.expm1(-difference) + difference
