"""Drops under watch: a run whose groups are dropped one after the other, and trained never, ends with the reason.

Ledgers flow in; a warning, or an error, flows out. Touches nothing.
"""

from __future__ import annotations

from collections import Counter

from counterflow.errors import RunFailed
from counterflow.records import Ledger

_HOPELESS_STEPS = 10
"""Batches' worth of groups that may be dropped between two steps, beside those that may be stale at once."""

_WORDS = {
    "poison": "poison (failed at every attempt, or unreadable)",
    "stale": "stale (a token older than admission.max_lag)",
    "filtered": "filtered (rewards all equal, buffer.drop_equal_rewards)",
}


class DropWatch:
    """Counts what was dropped since the last step.

    Args:
        groups_per_step: size of a batch.
        step_timeout_s: the learner's own patience, in seconds.
        groups_ahead: groups that may become stale all at once, without harm.
    """

    def __init__(self, groups_per_step: int, step_timeout_s: float, groups_ahead: int = 0) -> None:
        self._limit, self._step_timeout_s = _HOPELESS_STEPS * groups_per_step + groups_ahead, step_timeout_s
        self._steps, self._before = 0, Counter[str]()
        self._warned = False

    def look(self, steps: int, ledger: Ledger, last_error: str | None) -> str | None:
        """See the ledger after so many steps; returns a warning, once between two steps.

        Groups filtered because their rewards are all equal never end a run: signal may be rare, and the learner's own
        deadline ends the wait for it.

        Raises:
            RunFailed: more than ten batches, and what may be stale at once, were dropped for other reasons since the
                last step.
        """
        if steps != self._steps:
            self._steps, self._before, self._warned = steps, Counter(ledger.dropped), False
        dropped = Counter(ledger.dropped) - self._before
        if dropped.total() <= self._limit:
            return None
        by_reason = ", ".join(f"{count} {_WORDS.get(reason, reason)}" for reason, count in dropped.most_common())
        told = f"{dropped.total()} groups were dropped since the last step: {by_reason}"
        if dropped.total() - dropped["filtered"] > self._limit:
            raise RunFailed(told + (f"; the last that failed: {last_error}" if last_error else ""))
        if self._warned:
            return None
        self._warned = True
        return f"{told}; the learner waits {self._step_timeout_s:g} s for a batch (run.step_timeout_s)"
