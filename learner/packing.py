"""Where sequences and groups go: into rows without much padding, into microbatches, onto ranks.

Plain numbers and groups flow in, places and lists of whole groups flow out. Knows no tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import Enum

from counterflow.buffer.trajectory import Group, Trajectory


class Packing(Enum):
    """How the sequences of a microbatch lie in its rows."""

    PADDED = "padded"
    """One a row, padded to the longest: the reference path."""
    ROWS = "rows"
    """As many a row as fit into the length of the longest: attention costs no more than padded."""
    ONE_ROW = "one_row"
    """All in one row, for attention that skips what lies between sequences, such as flash attention."""


def scored(group: Group) -> list[Trajectory]:
    """The trajectories of a group whose reward did not fail."""
    return [t for t in group.trajectories if t.reward is not None]


def lengths_of(group: Group) -> list[int]:
    """Tokens of prompt and response, of each scored trajectory."""
    return [len(group.prompt_token_ids) + len(t.response_token_ids) for t in scored(group)]


def place(lengths: Sequence[int], packing: Packing) -> list[tuple[int, int]]:
    """Row and first column of each sequence; `ROWS` is first fit, the longest first."""
    if packing is Packing.PADDED:
        return [(row, 0) for row in range(len(lengths))]
    capacity = sum(lengths) if packing is Packing.ONE_ROW else max(lengths, default=0)
    shortest = min(lengths, default=0)
    places = [(0, 0)] * len(lengths)
    used: list[int] = []
    open_rows: list[int] = []
    # In one row the order stays: nothing is gained by another.
    order = (
        range(len(lengths)) if packing is Packing.ONE_ROW else sorted(range(len(lengths)), key=lambda i: -lengths[i])
    )
    for index in order:
        row = next((row for row in open_rows if used[row] + lengths[index] <= capacity), None)
        if row is None:
            row = len(used)
            used.append(0)
            open_rows.append(row)
        places[index] = (row, used[row])
        used[row] += lengths[index]
        if used[row] + shortest > capacity:
            open_rows.remove(row)
    return places


def split(groups: Sequence[Group], max_tokens: int, packing: Packing) -> list[list[Group]]:
    """Groups, in order, cut into microbatches of at most `max_tokens` tokens; a larger group stands alone.

    Padding counts in `PADDED`, where it depends on the longest; packed, the little there is does not.
    """
    result: list[list[Group]] = []
    pending: list[Group] = []
    rows, longest, tokens = 0, 0, 0
    for group in groups:
        lengths = lengths_of(group)
        if not lengths:
            continue
        grown = max(longest, *lengths)
        padded = packing is Packing.PADDED
        if pending and ((rows + len(lengths)) * grown if padded else tokens + sum(lengths)) > max_tokens:
            result.append(pending)
            pending, rows, tokens, grown = [], 0, 0, max(lengths)
        pending.append(group)
        rows, longest, tokens = rows + len(lengths), grown, tokens + sum(lengths)
    if pending:
        result.append(pending)
    return result


def shares(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Which groups each rank trains, by index: about equal tokens a rank, largest group first to who has least.

    Within a rank the order stays. With fewer groups than ranks some get none.
    """
    load = [(0, rank) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        least, rank = heapq.heappop(load)
        found[rank].append(index)
        heapq.heappush(load, (least + tokens[index], rank))
    return [sorted(own) for own in found]
