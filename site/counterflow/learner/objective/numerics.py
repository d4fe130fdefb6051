"""What numbers can hold: the precision in which log-probs are subtracted, and how large an exponent may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def largest_exponent(dtype: torch.dtype) -> float:
    """Exponents are bounded by it (39.9 in float32, 319 in float64): exp of it, and its square, are finite."""
    return 0.45 * math.log(torch.finfo(dtype).max)


def at_least_float32(values: Tensor) -> Tensor:
    """Float64 and float32 as they are, anything else as float32; gradients pass."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def masked_difference(minuend: Tensor, subtrahend: Tensor, mask: Tensor) -> Tensor:
    """minuend - subtrahend, float [tokens], 0 outside the mask even where an input is infinite or NaN.

    The inputs are replaced before the subtraction, so that no gradient of a masked token is NaN either.
    """
    return torch.where(mask, at_least_float32(minuend), 0.0) - torch.where(mask, at_least_float32(subtrahend), 0.0)
