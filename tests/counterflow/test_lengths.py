"""Buckets of prompt lengths, and how far two counts by bucket are apart, against numbers worked by hand."""

from __future__ import annotations

import pytest

from counterflow.lengths import added, bucket, distance, longest


def test_prompt_is_in_another_bucket() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 1024, 1025)] == [0, 0, 1, 2, 2, 3, 3, 4, 10, 11]
    assert [longest(i) for i in range(4)] == [1, 2, 4, 8]


def test_distance_is_another() -> None:
    # Shares .25, .25, .5 and .5, .5, 0: cumulative .25, .5, 1 and .5, 1, 1.
    assert distance([1, 1, 2], [5, 5]) == 0.5
    assert distance([1, 1, 2], [2, 2, 4]) == 0
    assert distance([4, 0], [0, 1]) == 1
    assert distance([], []) == distance([3], []) == 0


def test_counts_of_different_length_lose_their_end() -> None:
    assert added([1, 2], [1, 2, 3]) == [2, 4, 3]
    assert added([], []) == []
    assert distance([0.1] * 3, [0.3] * 3) == pytest.approx(0)
