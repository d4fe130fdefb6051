"""Lag: how far off-policy each token was when it was trained, and where it was lost. Pure functions on numpy arrays.

All numbers are policy versions. A token's lag is made on three stretches of its way, and these add up:

    sampled ──in flight──> added to the buffer ──in queue──> first taken out ──in learner──> update
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
import numpy.typing as npt

from counterflow.buffer.trajectory import BoolArray, Passage, VersionSpan

Versions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenLags:
    """Of every token, each int64 [tokens], in versions, never negative. `total` is the sum of the next three."""

    total: Versions
    """Lag: learner version at the update that trains the token, minus the version that sampled it."""
    in_flight: Versions
    """Learner version when the group was added to the buffer, minus the version that sampled the token."""
    in_queue: Versions
    """Learner version when the learner first took the group out of the buffer, minus that at its addition."""
    in_learner: Versions
    """Learner version at the update, minus that at the first take: above 0 when a group is used again."""
    cache_age: Versions
    """See `cache_ages`."""


def token_lags(spans: Iterable[VersionSpan], learner_version: int) -> Versions:
    """Lag of every token, int64 [tokens]: learner version at the update minus the version that sampled the token.

    Raises:
        ValueError: a token comes from a version that the learner has not made.
    """
    lags = learner_version - _versions(spans)
    if lags.size and lags.min() < 0:
        raise ValueError(
            f"a token was sampled by version {learner_version - lags.min()}, the learner is at {learner_version}"
        )
    return lags


def cache_ages(response: Sequence[VersionSpan], *, recomputed: bool) -> Versions:
    """How much older than itself a key-value cache may be that a token attended to, int64 [tokens], in versions.

    That is the version that sampled the token, minus the oldest one whose cache it may have read: 0 where running
    requests are recomputed at each update; else the oldest is that of its response's first span.

    Args:
        response: the version spans of one response, in order.
        recomputed: whether each update clears the key-value cache of running requests.
    """
    versions = _versions(response)
    return np.zeros_like(versions) if recomputed or not response else versions - response[0].version


def group_lags(
    responses: Sequence[Sequence[VersionSpan]], passage: Passage, learner_version: int, *, recomputed: bool
) -> TokenLags:
    """The lags of a group's tokens, response after response.

    A server that lost the end of its log may tell too low a version at an addition, until the learner has come back. So
    no group counts as added before its newest token was sampled, as added after its take, or as taken after the update.

    Args:
        responses: the version spans of each response.
        passage: the group's way through the buffer.
        learner_version: the learner's at the update.
        recomputed: see `cache_ages`.

    Raises:
        ValueError: a token comes from a version that the learner has not made.
    """
    total = token_lags(chain.from_iterable(responses), learner_version)
    sampled_by = learner_version - total
    newest = int(sampled_by.max(initial=0))
    taken_at = min(max(passage.taken_at, newest), learner_version)
    added_at = min(max(passage.added_at, newest), taken_at)
    return TokenLags(
        total=total,
        in_flight=added_at - sampled_by,
        in_queue=np.full_like(total, taken_at - added_at),
        in_learner=np.full_like(total, learner_version - taken_at),
        cache_age=_joined(cache_ages(response, recomputed=recomputed) for response in responses),
    )


def trained_lags(groups: Sequence[TokenLags], trained: BoolArray) -> TokenLags:
    """The lags of several groups, one after the other, of the tokens where `trained`, bool [tokens], is true."""
    return TokenLags(*(_joined(getattr(group, field.name) for group in groups)[trained] for field in fields(TokenLags)))


def mean(versions: Versions) -> float:
    """Mean over [tokens], in versions; 0 without tokens."""
    return float(versions.mean()) if versions.size else 0.0


def weighted_histogram(lags: Versions, weights: npt.NDArray[np.float64]) -> list[float]:
    """Share of the loss by lag: entry i sums the weights of the tokens of lag i, over the sum of all.

    Args:
        lags: int64 [tokens].
        weights: float64 [tokens], 0 or more: how much each token counts in the loss.

    Returns:
        As many numbers as a histogram of the lags has, of sum 1; none where nothing has weight.
    """
    whole = weights.sum()
    return (np.bincount(lags, weights=weights) / whole).tolist() if whole > 0 else []


def _versions(spans: Iterable[VersionSpan]) -> Versions:
    """The version that sampled each token, int64 [tokens]."""
    return _joined(np.full(span.end - span.start, span.version, np.int64) for span in spans)


def _joined(pieces: Iterable[Versions]) -> Versions:
    return np.concatenate([np.empty(0, np.int64), *pieces])
