"""Reading policies: which of the groups at hand make the next batch, and what it lacks, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from counterflow.buffer.standing import Row, Standing


@dataclass(frozen=True)
class Reading:
    """Which groups are read, and how often."""

    order: Literal["admission", "ready", "freshest"] = "admission"
    """By admission number; as they arrived; or those with the newest token first."""
    uses: int = 1
    """Steps that train each group; more than one only in admission order."""
    max_lag: float = math.inf
    """Groups with an older token are dropped as stale when a batch is to be made; inf drops none."""
    drop_equal_rewards: bool = False
    """Drop groups whose task rewards are all equal as filtered: they carry no signal."""


def stale(buffered: Mapping[int, Row], version: int, max_lag: float) -> list[int]:
    """The groups with a token that the learner, at `version`, would train more than `max_lag` versions late."""
    return [n for n, row in buffered.items() if 0 <= row.oldest_version < version - max_lag]


def next_in_admission_order(count: int, outstanding: Set[int], admitted: int) -> list[int]:
    """The `count` lowest numbers that are still to be trained, those to be admitted next included.

    Args:
        outstanding: groups being generated or on the stream.
        admitted: the number that the next admission will get.
    """
    first = sorted(outstanding)[:count]
    return first + list(range(admitted, admitted + count - len(first)))


def next_ready(count: int, buffered: Mapping[int, Row]) -> list[int]:
    """The `count` groups that arrived first; fewer when fewer are there."""
    return sorted(buffered, key=lambda n: buffered[n].arrival)[:count]


def next_freshest(count: int, buffered: Mapping[int, Row]) -> list[int]:
    """The `count` groups with the newest tokens, by admission among equals; fewer when fewer are there."""
    return sorted(buffered, key=lambda n: (-buffered[n].newest_version, n))[:count]


def missing(count: int, chosen: Sequence[int], standing: Standing, filtered: int) -> str:
    """Which of a batch's `count` groups are not there, and why, in words.

    Args:
        chosen: what was chosen so far, in admission order also what is not there.
        filtered: groups dropped meanwhile because their rewards are all equal.
    """
    absent = [n for n in chosen if n not in standing.buffered]
    where = f"{len(standing.leases)} are being generated"
    if absent:
        ends = standing.leases.get(absent[0])
        state = (
            "not admitted yet (do the actors serve a new enough version?)"
            if ends is None
            else f"being generated, lease ends at Unix time {ends:.0f} s"
        )
        where = f"the first of them is number {absent[0]}, {state}"
    dropped = f"; {filtered} were dropped, their rewards all equal (buffer.drop_equal_rewards)" if filtered else ""
    return f"{len(absent) or count - len(chosen)} of {count} groups: {where}{dropped}"
