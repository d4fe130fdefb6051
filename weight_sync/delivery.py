"""Delivery: the newest version brought to every actor, in the background, while the learner takes its next step.

One version is on its way at a time; one that is overtaken while it waits is skipped and counted. An actor serves a
version once it is proved; one that cannot be served is given up, and its owner told. In: calls of the learner and of
the actors. Runs in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import Fingerprints, prove
from counterflow.weight_sync.publisher import Shipment, StagedVersion, actor_of
from counterflow.weight_sync.slots import SLOTS

Told = Callable[[Exception], None]
_ATTEMPTS = 2
"""How often a version is brought to an actor before the actor is given up."""

_NOTHING = -1
"""The version of an actor whose load failed: it is paused, with weights of none."""


class Actor(Protocol):
    """An actor's calls. Each raises WeightSyncError where another try may succeed, else what the actor dies of."""

    async def load(self, shipment: Shipment) -> Sequence[Fingerprints]:
        """Pause and load a version; returns what each rank of the engine holds then."""

    async def serve(self, version: int) -> None:
        """Go on with the version that was loaded."""


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
        retried: is told of an actor that failed to load, and why, and is sent the version once more.
    """

    def __init__(self, port: Port, together: bool, retried: Callable[[str, Exception], None]) -> None:
        self._port, self._together, self._retried = port, together, retried
        self._actors: dict[str, Actor] = {}
        self._given_up: dict[str, Told] = {}
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

    async def join(self, name: str, actor: Actor, given_up: Told) -> bool:
        """Make an actor that serves version 0 a receiver; returns once it serves the newest version that was sent.

        Args:
            given_up: is told why, should the actor ever not be served; it is no receiver any more then.

        Returns:
            Whether it is served. Raises whatever the learner dies of.
        """
        async with self.hold:
            self._actors[name], self._given_up[name], self._serves[name] = actor, given_up, 0
            try:
                if self._newest is not None:
                    await self._bring(self._newest)
            except BaseException:
                self.leave(name)
                raise
            return name in self._actors

    def leave(self, name: str) -> None:
        """The actor is no receiver any more."""
        for known in (self._actors, self._given_up, self._serves):
            known.pop(name, None)

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
        """Bring a version to every actor that does not serve it; those that fail twice, or die, are given up.

        Ends: each round serves all, has somebody fail once more, or is one in which somebody left.
        """
        failures: Counter[str] = Counter()
        while behind := [name for name, version in self._serves.items() if version != staged.version]:
            # Who takes part in a broadcast again loads again.
            for name, error in (await self._ship(staged, list(self._actors) if self._together else behind)).items():
                failures[name] += 1
                if not isinstance(error, WeightSyncError) or failures[name] == _ATTEMPTS:
                    given_up = self._given_up[name]
                    self.leave(name)
                    given_up(error)
                else:
                    self.repeated += 1
                    self._retried(name, error)
        self.served = min(self._serves.values(), default=self.served)

    async def _ship(self, staged: StagedVersion, names: Sequence[str]) -> dict[str, Exception]:
        """Ship a version to these actors at once; returns which receivers failed on their own account, and why."""
        shipment = await self._port.prepare(staged, names)
        if any(name not in self._actors for name in names):
            # Some left meanwhile: a broadcast would wait for them.
            return {}
        sending = asyncio.ensure_future(self._port.send(staged))
        try:
            updates = (update(self._actors[name], shipment, sending) for name in names)
            answers = await asyncio.gather(*updates, return_exceptions=True)
            (sent,) = await asyncio.gather(sending, return_exceptions=True)
        finally:
            sending.cancel()
        left = set(names).difference(self._actors)
        errors: dict[str, Exception] = {}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            if name not in left:
                self._serves[name] = staged.version if answer is None else _NOTHING
                errors |= {} if answer is None else {name: answer}
        if isinstance(sent, BaseException) and not isinstance(sent, WeightSyncError):
            raise sent
        return _at_fault(errors, sent if isinstance(sent, WeightSyncError) else None, left)


async def update(actor: Actor, shipment: Shipment, published: Awaitable[Fingerprints]) -> None:
    """Load, prove, serve: an engine is told that it has a version once that is proved.

    Args:
        published: what the actor must hold, once it is known.
    """
    held = await actor.load(shipment)
    prove(f"policy version {shipment.version}", await published, held)
    await actor.serve(shipment.version)


def _at_fault(errors: dict[str, Exception], sent: WeightSyncError | None, left: set[str]) -> dict[str, Exception]:
    """Those that failed on their own account; all where none of them is known to have.

    Args:
        errors: what each receiver failed with.
        sent: what the sender says, which knows best whom it lost.
        left: who was to load, too, and is no receiver any more.
    """
    # Where a broadcast breaks, all receivers fail with errors of ours; one that died fails with another.
    own = {name: error for name, error in errors.items() if not isinstance(error, WeightSyncError)}
    lost = {actor_of(receiver) for receiver in sent.receivers} if sent else set()
    if sent:
        own |= dict.fromkeys(lost & errors.keys() - own.keys(), sent)
    return own if own or lost & left else errors
