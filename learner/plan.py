"""What each rank does with a batch: which groups it trains in which update and microbatch.

The groups of a batch flow in, an `Update` for each optimizer step flows out. Rank 0 plans, all ranks follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from counterflow.buffer.trajectory import Group
from counterflow.learner.packing import Packing, lengths_of, shares, split


@dataclass(frozen=True)
class Update:
    """One optimizer step over all ranks."""

    rounds: list[list[list[Group]]]
    """Of each rank, the groups of each microbatch: as many for every rank, some of them empty."""
    order: list[int]
    """Index in the batch of every group, in the order of ranks and microbatches."""


def plan(groups: Sequence[Group], updates: int, ranks: int, max_tokens: int, packing: Packing) -> list[Update]:
    """Whole groups, cut in order into `updates` minibatches, each shared evenly by the ranks.

    A minibatch of failed samples alone is left out.
    """
    count = len(groups)
    bounds = [count * update // updates for update in range(updates + 1)]
    return [
        _update(groups, range(start, end), ranks, max_tokens, packing)
        for start, end in pairwise(bounds)
        if any(lengths_of(groups[index]) for index in range(start, end))
    ]


def _update(groups: Sequence[Group], chosen: range, ranks: int, max_tokens: int, packing: Packing) -> Update:
    tokens = [sum(lengths_of(groups[index])) for index in chosen]
    own = [[chosen[index] for index in share] for share in shares(tokens, ranks)]
    rounds = [split([groups[index] for index in share], max_tokens, packing) for share in own]
    # Collectives must meet: who has less runs empty microbatches.
    most = max(1, *map(len, rounds))
    return Update([part + [[]] * (most - len(part)) for part in rounds], [index for share in own for index in share])
