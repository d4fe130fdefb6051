"""Delivery: every published version brought to every actor, in the background, while the learner takes its next step.

One version is on its way at a time; one that is overtaken while it waits is skipped and counted. An actor that cannot
be served is given up, and its owner told. In: calls of the learner and of the actors. Runs in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.publisher import Shipment, StagedVersion, actor_of
from counterflow.weight_sync.slots import SLOTS

Load = Callable[[Shipment, Awaitable[Fingerprints]], Awaitable[int]]
"""Has an actor load a version, proves it by the fingerprints once they are there, returns when the actor serves it."""

_ATTEMPTS = 2
"""How often a version is brought to an actor before the actor is given up."""

_NOTHING = -1
"""The version of an actor whose load failed: it is paused, with weights of none."""


class Port(Protocol):
    """The learner's calls. Each raises what it dies of."""

    async def stage(self, slot: int) -> StagedVersion:
        """Copy the current weights into a slot."""

    async def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        """Make ready to ship to these actors."""

    async def send(self, staged: StagedVersion) -> Fingerprints:
        """Ship; returns what the actors must hold then."""


class Delivery:
    """The versions on their way.

    Args:
        port: the learner.
        together: whether a version goes to all actors at once or not at all, as a broadcast does.
        given_up: is told of each actor that cannot be served, and why; it is no receiver any more.
    """

    def __init__(self, port: Port, together: bool, given_up: Callable[[str, Exception], None]) -> None:
        self._port, self._together, self._given_up = port, together, given_up
        self._actors: dict[str, Load] = {}
        self._serves: dict[str, int] = {}
        self._pending: StagedVersion | None = None
        self._newest: StagedVersion | None = None
        self._task: asyncio.Task[None] | None = None
        self.hold = asyncio.Lock()
        """Who holds it keeps the actors at the version they serve."""
        self.served = 0
        """The version that every actor serves."""
        self.skipped = 0
        """Versions that were overtaken before they were sent."""
        self.repeated = 0
        """Loads that did not succeed and were tried again."""

    async def join(self, actor: str, load: Load) -> bool:
        """Make an actor that serves version 0 a receiver; returns once it serves the newest version that was sent.

        False when it could not be served, and is no receiver. Raises whatever the learner dies of.
        """
        async with self.hold:
            self._actors[actor], self._serves[actor] = load, 0
            try:
                if self._newest is not None:
                    await self._bring(self._newest)
            except BaseException:
                self.leave(actor)
                raise
            return actor in self._actors

    def leave(self, actor: str) -> None:
        """The actor is no receiver any more."""
        self._actors.pop(actor, None)
        self._serves.pop(actor, None)

    @property
    def actors(self) -> tuple[str, ...]:
        """The receivers."""
        return tuple(self._actors)

    async def publish(self) -> None:
        """Stage the learner's newest version and send it on in the background. Call it between two steps.

        Raises:
            Whatever the learner died of, or kept an earlier version.
        """
        self.raise_failure()
        overtaken, self._pending = self._pending, None
        self.skipped += overtaken is not None
        # The newest that was taken stays as it is: actors load it, or may join later.
        kept = self._newest.slot if self._newest else None
        self._pending = await self._port.stage(next(slot for slot in range(SLOTS) if slot != kept))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._deliver())

    async def arrived(self) -> None:
        """Return when nothing is on its way any more."""
        while self._task is not None and not self._task.done():
            await asyncio.shield(self._task)
        self.raise_failure()

    async def close(self) -> None:
        """Stop sending."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._task

    def raise_failure(self) -> None:
        """Raise what kept a version from being sent, if something did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _deliver(self) -> None:
        while self._pending is not None:
            async with self.hold:
                # Taken only now: while the lock was held a newer version may have come.
                staged, self._pending = self._pending, None
                if staged is None:
                    return
                self._newest = staged
                await self._bring(staged)

    async def _bring(self, staged: StagedVersion) -> None:
        """Bring a version to every actor that does not serve it; those that fail twice, or die, are given up."""
        failures: Counter[str] = Counter()
        while behind := [actor for actor, version in self._serves.items() if version != staged.version]:
            # Who takes part in a broadcast again loads again.
            actors = list(self._actors) if self._together else behind
            for actor, error in (await self._ship(staged, actors)).items():
                failures[actor] += 1
                if not isinstance(error, WeightSyncError) or failures[actor] == _ATTEMPTS:
                    self.leave(actor)
                    self._given_up(actor, error)
                else:
                    self.repeated += 1
        self.served = min(self._serves.values(), default=self.served)

    async def _ship(self, staged: StagedVersion, actors: Sequence[str]) -> dict[str, Exception]:
        """Ship a version to these actors at once; returns who failed on its own account, and why."""
        shipment = await self._port.prepare(staged, actors)
        if any(actor not in self._actors for actor in actors):
            # Some left meanwhile: a broadcast would wait for them.
            return {}
        sending = asyncio.ensure_future(self._port.send(staged))
        loads = asyncio.gather(*(self._actors[actor](shipment, sending) for actor in actors), return_exceptions=True)
        (sent,), answers = await asyncio.gather(asyncio.gather(sending, return_exceptions=True), loads)
        errors: dict[str, Exception] = {}
        for actor, answer in zip(actors, answers, strict=True):
            if isinstance(answer, Exception):
                errors[actor] = answer
            elif isinstance(answer, BaseException):
                raise answer
            if actor in self._serves:
                self._serves[actor] = _NOTHING if isinstance(answer, Exception) else answer
        if isinstance(sent, BaseException) and not isinstance(sent, WeightSyncError):
            raise sent
        return self._at_fault(errors, sent if isinstance(sent, WeightSyncError) else None)

    def _at_fault(self, errors: dict[str, Exception], sent: WeightSyncError | None) -> dict[str, Exception]:
        """Those that failed on their own account; all where none of them is known to have.

        Args:
            errors: what each load died of.
            sent: what the sender says, which knows best whom it lost.
        """
        # Where a broadcast breaks, all receivers fail with errors of ours; one that died fails with another.
        own = {actor: error for actor, error in errors.items() if not isinstance(error, WeightSyncError)}
        lost = {actor_of(receiver) for receiver in sent.receivers} if sent else set()
        if sent:
            own |= dict.fromkeys(lost & errors.keys() - own.keys(), sent)
        only_others = lost and not lost & self._actors.keys()
        return own if own or only_others else errors
