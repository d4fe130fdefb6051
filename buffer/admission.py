"""Admission: which groups may start, as pure functions that live runs and the simulator share.

Group n (n = 0, 1, 2, ...) is trained by step floor(n / B) or earlier, in admission order. It may start only when
floor(n / B) <= version + max_lag, so that none of its tokens is more than max_lag versions old when it is trained.
With several uses the last one counts: u * floor(n / B) + u - 1 <= version + max_lag, for u uses.
That holds for each actor by the version that it serves, also where a lease ran out and the group is started again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def place(n: int, trained: int, outstanding: Iterable[int]) -> int:
    """How many groups are trained before group n, in admission order: it may start again when this < `open_groups`.

    Args:
        trained: groups trained so far.
        outstanding: groups being generated or buffered.
    """
    return trained + sum(m < n for m in outstanding)


def open_groups(
    version: int, max_lag: float, groups_per_step: int, total_groups: int | None = None, uses: int = 1
) -> int:
    """How many groups may have started by now: group n may start when n < this.

    Args:
        version: policy version that the generating actor serves. Not the learner's: a version that has not arrived
            samples no tokens.
        max_lag: the versions that admission may run ahead, the staleness budget unless a policy at consumption keeps
            that one; inf is unbounded.
        groups_per_step: B.
        total_groups: groups the whole run trains, beyond which none starts.
        uses: steps that train each group, one after the other: it is the last of them that must not be too late.

    Groups dropped before they were trained make room for as many others: add their number to the result.
    """
    limit = math.inf if math.isinf(max_lag) else (version + int(max_lag) + 1) // uses * groups_per_step
    if total_groups is not None:
        limit = min(limit, total_groups)
    return 2**53 if math.isinf(limit) else int(limit)
