"""When a process did what: overlapping activities as intervals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from counterflow.records import Interval


class BusyClock:
    """Turns overlapping activities into intervals: one interval an activity while at least one of its kind runs."""

    def __init__(self, owner: str, started_at: float) -> None:
        self._owner, self._started_at = owner, started_at
        self._running: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._intervals: list[Interval] = []

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """The activity runs for as long as the context is open."""
        if not self._running.get(activity):
            self._since[activity] = self._now()
        self._running[activity] = self._running.get(activity, 0) + 1
        try:
            yield
        finally:
            self._running[activity] -= 1
            if not self._running[activity]:
                self._close(activity)

    def drain(self) -> list[Interval]:
        """The intervals since the last call; those that go on are cut here and continue."""
        for activity, running in self._running.items():
            if running:
                self._close(activity)
                self._since[activity] = self._now()
        drained, self._intervals = self._intervals, []
        return drained

    def _close(self, activity: str) -> None:
        self._intervals.append(Interval(self._owner, activity, self._since[activity], self._now()))

    def _now(self) -> float:
        return time.time() - self._started_at
