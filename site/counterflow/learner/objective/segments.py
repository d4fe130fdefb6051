"""Sums along sequences and groups of a flat batch: whole, of earlier tokens, of later tokens.

Sums are formed for each segment alone, in float64 and in order, so that what stands beside a sequence in the batch, or
goes wrong in it, changes nothing in another.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_segments(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of `values` [n] by `index` int64 [n], in any order: [count], 0 where a segment is empty.

    Always added in the order of the entries, so that the same values give the same sum, bit for bit.
    """
    order = torch.argsort(index, stable=True)
    rows, _ = _rows(values[order], index[order], count, shift=0)
    return rows.cumsum(1)[:count, -1].to(values.dtype)


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
    rows, place = _rows(values, index, count, shift)
    return rows.cumsum(1)[index, place].to(values.dtype)


def _rows(values: Tensor, index: Tensor, count: int, shift: int) -> tuple[Tensor, Tensor]:
    """A row a segment, its values `shift` from the left: float64 [count + 1, longest + 1]; and each entry's column.

    The last row is empty: CUDA adds up a single row in an order that is not fixed, several each in its own.
    """
    sizes = torch.bincount(index, minlength=count)
    longest = int(sizes.max()) if index.shape[0] else 0
    place = torch.arange(index.shape[0], device=index.device) - (sizes.cumsum(0) - sizes)[index]
    rows = values.new_zeros(count + 1, longest + 1, dtype=torch.float64)
    return rows.index_put((index, place + shift), values.double()), place
