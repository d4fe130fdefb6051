"""A run in simulated time: actors, buffer and learner as events, under the live run's admission and policies.

Latencies, publishing delays and crashes flow in, what was trained, dropped and generated flows out. Nothing is sampled
and nothing is learnt: a group is a prompt's length and the versions that its actor served while it lasted. A version
reaches each actor when its delay is over, newest first; running groups go on under it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from counterflow.buffer.admission import open_groups, place
from counterflow.buffer.reading import next_freshest, next_in_admission_order, next_ready, stale
from counterflow.buffer.standing import Row
from counterflow.buffer.trajectory import Passage, VersionSpan, spans
from counterflow.errors import RunFailed
from counterflow.learner.staleness import Order, Rule, Shares, shares
from counterflow.weight_sync.lag import TokenLags, group_lags

_TOKENS = 16
"""Of a group, sampled at even intervals while it lasts."""


@dataclass(frozen=True)
class World:
    """What happens to a run from outside, as functions; all times in seconds."""

    latency_s: Callable[[int, int], float]
    """How long group n takes at its k-th attempt."""
    publish_s: Callable[[int, int], float]
    """How long a version takes to an actor: (version, actor)."""
    train_s: Callable[[int], float]
    """How long the step takes that makes a version."""
    prompt_tokens: Callable[[int], int] = lambda n: 1
    """The length of group n's prompt."""
    crashes: Sequence[tuple[float, int]] = ()
    """When which actor dies, with all it generates; another with the newest version is there at once."""


@dataclass(frozen=True)
class Setting:
    """The keys of a configuration that the simulation reads."""

    rule: Rule
    order: Order = "admission"
    run_ahead: float | None = None
    groups_per_step: int = 4
    steps: int = 20
    actors: int = 1
    groups_in_flight: int = 64
    lease_s: float = 300.0


@dataclass(frozen=True)
class Trained:
    """A group at the step that trained it."""

    admission: int
    version: int
    """The learner's at the update."""
    lags: TokenLags
    shares: Shares


@dataclass
class Outcome:
    """What a simulated run did."""

    trained: list[Trained] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Groups dropped as stale."""
    counts: Counter[str] = field(default_factory=Counter)
    """`generated`, `duplicate`, `reissued`, `buffered`, `in_flight` groups."""
    time_s: float = 0.0

    @property
    def closes(self) -> bool:
        """Whether every group is somewhere, once."""
        gone = len(self.trained) + len(self.dropped) + self.counts["duplicate"]
        return self.counts["generated"] == gone + self.counts["buffered"] + self.counts["in_flight"]


@dataclass
class _Actor:
    version: int = 0
    served: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """Since when it serves which version."""
    running: set[int] = field(default_factory=set)
    """Tasks, by number."""


@dataclass(frozen=True)
class _Arrived:
    row: Row
    spans: tuple[VersionSpan, ...]
    taken_at: int = -1


def simulate(setting: Setting, world: World) -> Outcome:
    """Run to the last step.

    Raises:
        RunFailed: nothing can happen any more, and the last step is not taken.
    """
    return _Simulation(setting, world).run()


class _Simulation:
    def __init__(self, setting: Setting, world: World) -> None:
        self._setting, self._world, self._outcome = setting, world, Outcome()
        self._actors = [_Actor() for _ in range(setting.actors)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._tasks = itertools.count(), itertools.count()
        self._now, self._version, self._admitted, self._replaced = 0.0, 0, 0, 0
        self._leases: dict[int, float] = {}
        self._attempts: Counter[int] = Counter()
        self._buffer: dict[int, _Arrived] = {}
        self._training: list[int] = []
        for time_s, actor in world.crashes:
            self._at(time_s, partial(self._crash, actor))

    def run(self) -> Outcome:
        self._turn()
        while self._version < self._setting.steps:
            if not self._events:
                raise RunFailed(
                    f"deadlock at version {self._version} after {self._now:g} s: {len(self._buffer)} groups buffered, "
                    f"{len(self._leases)} leased, {self._admitted} admitted"
                )
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._turn()
        counts = self._outcome.counts
        counts["buffered"], counts["in_flight"] = len(self._buffer), len(self._leases)
        self._outcome.time_s = self._now
        return self._outcome

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def _turn(self) -> None:
        """All that follows at once: the learner takes a batch if it can, actors start what they may."""
        self._take()
        for index, actor in enumerate(self._actors):
            while len(actor.running) < self._setting.groups_in_flight and (n := self._admit(actor)) is not None:
                self._start(index, actor, n)

    def _admit(self, actor: _Actor) -> int | None:
        """As buffer/admit.lua: leases that ran out first, then the next number, while admission is open."""
        setting, rule = self._setting, self._setting.rule
        ahead = rule.max_lag if setting.run_ahead is None else setting.run_ahead
        total = setting.steps * setting.groups_per_step
        opened = open_groups(actor.version, ahead, setting.groups_per_step, total)
        outstanding, trained = self._leases.keys() | self._buffer.keys(), len(self._outcome.trained)
        for n, ends in self._leases.items():
            if ends <= self._now and place(n, trained, outstanding) < opened:
                self._outcome.counts["reissued"] += 1
                return n
        if self._admitted - self._replaced >= opened:
            return None
        self._admitted += 1
        self._outcome.counts["generated"] += 1
        return self._admitted - 1

    def _start(self, index: int, actor: _Actor, n: int) -> None:
        self._attempts[n] += 1
        self._leases[n] = self._now + self._setting.lease_s
        # A lease that runs out is seen by whoever asks next: somebody asks then.
        self._at(self._leases[n], lambda: None)
        task, start = next(self._tasks), self._now
        actor.running.add(task)
        latency_s = self._world.latency_s(n, self._attempts[n])
        self._at(start + latency_s, lambda: self._finish(index, task, n, start))

    def _finish(self, index: int, task: int, n: int, start: float) -> None:
        actor = self._actors[index]
        if task not in actor.running:
            return  # It died with its actor.
        actor.running.remove(task)
        if n not in self._leases:
            self._outcome.counts["generated"] += 1
            self._outcome.counts["duplicate"] += 1
            return
        del self._leases[n]
        sampled = _spans(actor.served, start, self._now)
        entry_id = f"{next(self._order)}-0".encode()
        row = Row(entry_id, sampled[0].version, sampled[-1].version, self._version, _TOKENS)
        self._buffer[n] = _Arrived(row, sampled)

    def _crash(self, index: int) -> None:
        self._actors[index] = _Actor(self._version, [(self._now, self._version)])

    def _serve(self, index: int, version: int) -> None:
        actor = self._actors[index]
        if version > actor.version:
            actor.version = version
            actor.served.append((self._now, version))

    def _take(self) -> None:
        setting = self._setting
        if self._training or self._version >= setting.steps:
            return
        rows = {n: arrived.row for n, arrived in self._buffer.items()}
        order = setting.order
        past = setting.rule.dropped_past(order)
        for n in stale(rows, self._version, past):
            del self._buffer[n], rows[n]
            self._replaced += 1
            self._outcome.dropped.append(n)
        count = setting.groups_per_step
        if order == "admission":
            chosen = next_in_admission_order(count, rows.keys() | self._leases.keys(), self._admitted)
        else:
            chosen = (next_ready if order == "ready" else next_freshest)(count, rows)
        if len(chosen) == count and all(n in rows for n in chosen):
            for n in chosen:
                self._buffer[n] = replace(self._buffer[n], taken_at=self._version)
            self._training = chosen
            self._at(self._now + self._world.train_s(self._version + 1), self._commit)

    def _commit(self) -> None:
        for n in self._training:
            arrived = self._buffer.pop(n)
            passage = Passage(arrived.row.added_at, arrived.taken_at)
            lags = group_lags([arrived.spans], passage, self._version, recomputed=True)
            mask = lags.total >= 0
            left = shares(lags.total, mask, self._setting.rule)
            self._outcome.trained.append(Trained(n, self._version, lags, left))
        self._training = []
        self._version += 1
        for index in range(len(self._actors)):
            arrives = self._now + self._world.publish_s(self._version, index)
            self._at(arrives, partial(self._serve, index, self._version))


def _spans(served: Sequence[tuple[float, int]], start: float, end: float) -> tuple[VersionSpan, ...]:
    """The versions that sampled the tokens of a group that lasted from `start` to `end`."""
    times = [start + (end - start) * i / _TOKENS for i in range(_TOKENS)]
    versions = [max((version for since, version in served if since <= time), default=served[0][1]) for time in times]
    return spans(versions)
