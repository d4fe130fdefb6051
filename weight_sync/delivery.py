"""Delivery: takes each policy version from the learner to every actor, in the background, one at a time.

Lives in the supervisor's event loop. Two slots: while one is on its way the learner stages the next version into the
other; a version overtaken before its turn is skipped and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from counterflow.errors import DeadlineExceeded
from counterflow.weight_sync.publisher import SLOTS, StagedVersion

Stage = Callable[[int], Awaitable[StagedVersion]]
Load = Callable[[StagedVersion], Awaitable[int]]


class Delivery:
    """The versions on their way.

    Args:
        stage: has the learner copy its weights into a slot.
        loads: one call for each actor, which returns when the actor serves the version.
        timeout_s: longest wait for a version to arrive at every actor, in seconds.
    """

    def __init__(self, stage: Stage, loads: Sequence[Load], timeout_s: float) -> None:
        self._stage, self._loads, self._timeout_s = stage, loads, timeout_s
        self._pending: StagedVersion | None = None
        self._on_its_way: StagedVersion | None = None
        self._task: asyncio.Task[None] | None = None
        self.hold = asyncio.Lock()
        """Who holds it keeps the actors at the version they serve."""
        self.served = 0
        """The version that every actor serves."""
        self.skipped = 0
        """Versions that were overtaken before they were sent."""

    async def publish(self) -> None:
        """Stage the learner's newest version and send it on in the background. Call it between two steps.

        Raises:
            WeightSyncError, DeadlineExceeded: an earlier version did not arrive.
        """
        self.raise_failure()
        overtaken, self._pending = self._pending, None
        self.skipped += overtaken is not None
        busy = self._on_its_way.slot if self._on_its_way else None
        slot = next(slot for slot in range(SLOTS) if slot != busy)
        self._pending = await self._stage(slot)
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
        """Raise what kept a version from arriving, if something did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _deliver(self) -> None:
        while self._pending is not None:
            async with self.hold:
                # Taken only now: while the lock was held a newer version may have come.
                staged, self._pending = self._pending, None
                if staged is None:
                    return
                self._on_its_way = staged
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await asyncio.gather(*(load(staged) for load in self._loads))
                except TimeoutError as error:
                    raise DeadlineExceeded(
                        "weight sync", f"policy version {staged.version} to arrive at every actor", self._timeout_s
                    ) from error
                finally:
                    self._on_its_way = None
                self.served = staged.version
