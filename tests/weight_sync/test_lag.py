"""Lag: each definition on a schedule written out by hand, and parts that always add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.buffer.trajectory import Passage, VersionSpan
from counterflow.weight_sync.lag import (
    TokenLags,
    cache_ages,
    group_lags,
    mean,
    token_lags,
    trained_lags,
    weighted_histogram,
)

# The schedule. Two groups, each trained twice (uses = 2); the learner's versions stand on the left.
#
#   0   A's first response is sampled
#   1   A's second response ends; A is added                (A.added_at = 1)
#   2   B's only response begins
#   3   A is first taken, and trained                       (A.taken_at = 3)
#   4   B's response ends; B is added, first taken, trained (B.added_at = B.taken_at = 4)
#   5   the update that trains A for the second time, and B for the second time
A = [[VersionSpan(0, 0, 2)], [VersionSpan(0, 0, 1), VersionSpan(1, 1, 3)]]
B = [[VersionSpan(2, 0, 1), VersionSpan(3, 1, 3), VersionSpan(4, 3, 4)]]
A_PASSAGE, B_PASSAGE = Passage(added_at=1, taken_at=3), Passage(added_at=4, taken_at=4)


def listed(lags: TokenLags) -> dict[str, list[int]]:
    return {name: versions.tolist() for name, versions in vars(lags).items()}


def test_lag_is_not_learner_version_minus_token_version() -> None:
    spans = [VersionSpan(3, 0, 2), VersionSpan(5, 2, 3)]
    assert token_lags(spans, learner_version=7).tolist() == [4, 4, 2]


def test_token_from_the_future_gets_a_negative_lag() -> None:
    with pytest.raises(ValueError, match="version 8, the learner is at 7"):
        token_lags([VersionSpan(8, 0, 1)], learner_version=7)


def test_first_use_of_a_group_has_other_parts_than_the_schedule() -> None:
    assert listed(group_lags(A, A_PASSAGE, 3, recomputed=True)) == {
        "total": [3, 3, 3, 2, 2],
        "in_flight": [1, 1, 1, 0, 0],
        "in_queue": [2, 2, 2, 2, 2],
        "in_learner": [0, 0, 0, 0, 0],
        "cache_age": [0, 0, 0, 0, 0],
    }
    assert listed(group_lags(B, B_PASSAGE, 4, recomputed=True)) == {
        "total": [2, 1, 1, 0],
        "in_flight": [2, 1, 1, 0],
        "in_queue": [0, 0, 0, 0],
        "in_learner": [0, 0, 0, 0],
        "cache_age": [0, 0, 0, 0],
    }


def test_second_use_of_a_group_has_other_parts_than_the_schedule() -> None:
    assert listed(group_lags(A, A_PASSAGE, 5, recomputed=False)) == {
        "total": [5, 5, 5, 4, 4],
        "in_flight": [1, 1, 1, 0, 0],
        "in_queue": [2, 2, 2, 2, 2],
        "in_learner": [2, 2, 2, 2, 2],
        "cache_age": [0, 0, 0, 1, 1],
    }
    assert listed(group_lags(B, B_PASSAGE, 5, recomputed=False)) == {
        "total": [3, 2, 2, 1],
        "in_flight": [2, 1, 1, 0],
        "in_queue": [0, 0, 0, 0],
        "in_learner": [1, 1, 1, 1],
        "cache_age": [0, 1, 1, 2],
    }


def test_lags_of_a_step_are_those_of_tokens_that_it_does_not_train() -> None:
    groups = [group_lags(A, A_PASSAGE, 5, recomputed=True), group_lags(B, B_PASSAGE, 5, recomputed=True)]
    trained = np.array([True, False, False, True, False, False, True, False, True])
    lags = trained_lags(groups, trained)
    assert listed(lags) == {
        "total": [5, 4, 2, 1],
        "in_flight": [1, 0, 1, 0],
        "in_queue": [2, 2, 0, 0],
        "in_learner": [2, 2, 1, 1],
        "cache_age": [0, 0, 0, 0],
    }
    assert mean(lags.total) == 3.0
    assert (mean(lags.in_flight), mean(lags.in_queue), mean(lags.in_learner)) == (0.5, 1.0, 1.5)


def test_cache_is_older_than_the_first_span_or_than_nothing() -> None:
    response = [VersionSpan(2, 0, 0), VersionSpan(3, 0, 2), VersionSpan(7, 2, 3)]
    assert cache_ages(response, recomputed=False).tolist() == [1, 1, 5]
    assert cache_ages(response, recomputed=True).tolist() == [0, 0, 0]
    assert cache_ages([], recomputed=False).tolist() == cache_ages([], recomputed=True).tolist() == []


def test_server_that_forgot_versions_makes_a_part_negative() -> None:
    # It was at version 1 again when it got a group with tokens of version 4, which the learner took at 5.
    late = [[VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)]]
    assert listed(group_lags(late, Passage(added_at=1, taken_at=5), 5, recomputed=True)) == {
        "total": [2, 1],
        "in_flight": [1, 0],
        "in_queue": [1, 1],
        "in_learner": [0, 0],
        "cache_age": [0, 0],
    }


@pytest.mark.parametrize("passage", [Passage(9, 2), Passage(2, 9), Passage(9, 9), Passage(5, 3)])
def test_passage_that_cannot_be_makes_parts_that_do_not_add_up(passage: Passage) -> None:
    lags = group_lags([[VersionSpan(2, 0, 1)]], passage, 4, recomputed=True)
    parts = (lags.in_flight, lags.in_queue, lags.in_learner)
    assert sum(parts).tolist() == [2] and all((part >= 0).all() for part in parts)


def test_no_tokens_have_a_lag() -> None:
    lags = group_lags([[], [VersionSpan(3, 0, 0)]], Passage(3, 3), 4, recomputed=False)
    assert all(versions.shape == (0,) and versions.dtype == np.int64 for versions in vars(lags).values())
    assert mean(lags.total) == 0.0
    assert weighted_histogram(lags.total, np.empty(0)) == []


def test_weighted_histogram_counts_tokens() -> None:
    # Lags 0, 2, 2, 1, 2 of weights 1, 2, 1/2, 0, 1/2: the sum is 4.
    lags, weights = np.array([0, 2, 2, 1, 2]), np.array([1.0, 2.0, 0.5, 0.0, 0.5])
    assert weighted_histogram(lags, weights) == [0.25, 0.0, 0.75]
    assert weighted_histogram(lags, np.ones(5)) == pytest.approx([0.2, 0.2, 0.6])
    assert weighted_histogram(lags, np.zeros(5)) == []


@st.composite
def responses(draw: st.DrawFn) -> list[list[VersionSpan]]:
    """Responses as an actor makes them: spans that follow each other, of versions that only grow."""
    made = []
    for _ in range(draw(st.integers(0, 3))):
        spans, version, at = [], draw(st.integers(0, 4)), 0
        for length in draw(st.lists(st.integers(0, 3), max_size=3)):
            spans.append(VersionSpan(version, at, at + length))
            version, at = version + draw(st.integers(0, 3)), at + length
        made.append(spans)
    return made


@given(responses(), st.integers(-1, 20), st.integers(-1, 20), st.integers(14, 20), st.booleans())
def test_parts_are_negative_or_do_not_add_up(
    group: list[list[VersionSpan]], added_at: int, taken_at: int, learner_version: int, recomputed: bool
) -> None:
    lags = group_lags(group, Passage(added_at, taken_at), learner_version, recomputed=recomputed)
    parts = np.stack([lags.in_flight, lags.in_queue, lags.in_learner])
    spans = [span for response in group for span in response]
    np.testing.assert_array_equal(parts.sum(0), token_lags(spans, learner_version))
    assert (parts >= 0).all() and (lags.cache_age >= 0).all()
    assert all(versions.shape == lags.total.shape for versions in vars(lags).values())


@given(responses(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_passage_that_can_be_is_changed(group: list[list[VersionSpan]], flight: int, queue: int, learner: int) -> None:
    """Where added_at and taken_at are in order they are believed."""
    newest = max((span.version for spans in group for span in spans), default=0)
    added_at = newest + flight
    taken_at = added_at + queue
    lags = group_lags(group, Passage(added_at, taken_at), taken_at + learner, recomputed=True)
    assert set(lags.in_queue.tolist()) <= {queue} and set(lags.in_learner.tolist()) <= {learner}


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1e30)), min_size=1))
def test_weighted_histogram_does_not_sum_to_one(tokens: list[tuple[int, float]]) -> None:
    lags, weights = np.array([lag for lag, _ in tokens]), np.array([weight for _, weight in tokens])
    shares = weighted_histogram(lags, weights)
    assert len(shares) == (lags.max() + 1 if weights.sum() > 0 else 0)
    assert not shares or sum(shares) == pytest.approx(1)
