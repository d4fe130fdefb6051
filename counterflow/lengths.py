"""Lengths of prompts, in buckets of a factor of two, and how far two distributions are apart: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest


def bucket(prompt_tokens: int) -> int:
    """Bucket i holds prompts of more than 2^(i-1) and up to 2^i tokens."""
    return max(prompt_tokens - 1, 0).bit_length()


def longest(index: int) -> int:
    """The longest prompt of a bucket, in tokens."""
    return 1 << index


def added(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Two counts by bucket as one, as long as the longer."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


def distance(offered: Sequence[float], trained: Sequence[float]) -> float:
    """Kolmogorov-Smirnov distance of two counts by bucket: the largest difference of their cumulative shares, 0 to 1.

    Within a bucket nothing is told apart, so that of the lengths themselves may be larger. 0 where one is empty.
    """
    whole, part = math.fsum(offered), math.fsum(trained)
    if not (whole and part):
        return 0.0
    below = zip_longest(offered, trained, fillvalue=0)
    differences = accumulate(a / whole - b / part for a, b in below)
    return max(abs(difference) for difference in differences)
