"""Sums along sequences and groups of a flat batch: whole, of earlier tokens, of later tokens.

Running sums are formed for each sequence alone, in float64, so that what stands beside a sequence in the batch, or
goes wrong in it, changes nothing in another.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Float64 and float32 as they are, anything else as float32; gradients pass."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def sum_segments(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of `values` [n] by `index` int64 [n]: float [count], 0 where a segment is empty."""
    return values.new_zeros(count).index_add(0, index, values)


def sum_through(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of `values` [n] of the same segment up to and with each entry: float [n]; `index` is non-decreasing."""
    return _running_sum(values, index, count, shift=0)


def sum_before(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of the earlier `values` [n] of the same segment: float [n]; `index` int64 [n] is non-decreasing."""
    return _running_sum(values, index, count, shift=1)


def sum_from(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of `values` [n] of the same segment from each entry on, itself included: float [n]."""
    return _running_sum(values.flip(0), count - 1 - index.flip(0), count, shift=0).flip(0)


def sum_after(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of the later `values` [n] of the same segment: float [n]; `index` int64 [n] is non-decreasing."""
    return _running_sum(values.flip(0), count - 1 - index.flip(0), count, shift=1).flip(0)


def _running_sum(values: Tensor, index: Tensor, count: int, shift: int) -> Tensor:
    sizes = torch.bincount(index, minlength=count)
    longest = int(sizes.max()) if index.shape[0] else 0
    place = torch.arange(index.shape[0], device=index.device) - (sizes.cumsum(0) - sizes)[index]
    rows = values.new_zeros(count, longest + 1, dtype=torch.float64)
    rows = rows.index_put((index, place + shift), values.double())
    return rows.cumsum(1)[index, place].to(values.dtype)
