"""The actors of a run: started, made receivers of weights, watched, replaced when they die, more or fewer when asked.

Their handles are held here and nowhere else. Lives in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from counterflow.actors.rollout import ActorState
from counterflow.calls import call
from counterflow.configs.schema import RunConfig
from counterflow.errors import CounterflowError, DeadlineExceeded, PlacementError, ProcessDied, RunFailed, first_line
from counterflow.room import Room
from counterflow.telemetry import Telemetry
from counterflow.weight_sync.delivery import Delivery
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.publisher import Shipment

_ANSWER_TIMEOUT_S = 60.0
_END_S = 10.0


class Fleet:
    """All actors of a run.

    Args:
        spawn: makes the process of an actor, by its number, in a place on the cluster.
        delivery: brings every actor its versions.
        expire: has the groups that an actor of this name generated be given out again.
    """

    def __init__(
        self,
        config: RunConfig,
        room: Room,
        spawn: Callable[[int, int], Any],
        delivery: Delivery,
        expire: Callable[[str], object],
        telemetry: Telemetry,
    ) -> None:
        self._config, self._room, self._spawn, self._expire = config, room, spawn, expire
        self._delivery, self._telemetry = delivery, telemetry
        self._members = set(range(config.actors.count))
        self._handles: dict[int, Any] = {}
        self._losses: dict[int, Exception] = {}
        self._segments: dict[int, set[Path]] = {}
        self._serving: set[int] = set()
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self.restarts, self._begun = 0, False
        self._layout: Layout

    async def start(self, layout: Layout) -> None:
        """Start every actor and make it a receiver.

        Raises:
            RunFailed, DeadlineExceeded, ConfigError: one did not start; before the run, none is replaced.
        """
        self._layout = layout
        await asyncio.gather(*(self._start(i) for i in range(self._config.actors.count)))

    async def begin(self) -> None:
        """Have every actor begin to generate."""
        self._begun = True
        await self.ask(lambda _, actor: actor.begin.remote(), "to begin")

    def replace(self, index: int, error: Exception) -> None:
        """Put another process in the place of the actor, unless that is being done."""
        self._losses[index] = error
        if index not in self._members or (index in self._replacing and not self._replacing[index].done()):
            return
        self._serving.discard(index)
        self._delivery.leave(_name(index))
        self._replacing[index] = asyncio.create_task(self._replace(index, error))

    @property
    def wanted(self) -> int:
        """How many actors there are to be."""
        return len(self._members)

    def resize(self, count: int) -> None:
        """Have actors join, or those of the highest numbers leave, until there are so many. Returns before they do."""
        for index in sorted(self._members)[count:]:
            self._members.discard(index)
            self._leaving[index] = asyncio.create_task(self._leave(index))
        taken = self._members | {index for index, task in self._leaving.items() if not task.done()}
        free = (index for index in itertools.count() if index not in taken)
        for index in itertools.islice(free, max(count - len(self._members), 0)):
            self._members.add(index)
            self._replacing[index] = asyncio.create_task(self._add(index))

    def check(self) -> None:
        """Raise what the run cannot go on with: no actor is left, or the learner died while one joined."""
        for tasks in (self._replacing, self._leaving):
            for index, task in list(tasks.items()):
                if task.done():
                    del tasks[index]
                    task.result()

    async def states(self) -> list[tuple[int, ActorState]]:
        """How the living actors are doing; one that died, or says nothing, is replaced.

        Raises:
            CounterflowError: what an actor ended with, where another would end with it too.
        """
        return await self.ask(lambda _, actor: actor.state.remote(), "to say how it is")

    async def ask(
        self, question: Callable[[int, Any], Awaitable[Any]], what: str, timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> list[tuple[int, Any]]:
        """Ask all serving actors the same; their answers, by actor.

        One that dies of it, or says nothing for so long, is replaced and left out.
        """
        asked = [(i, self._handles[i]) for i in sorted(self._serving)]
        answers = await asyncio.gather(
            *(call(question(i, actor), f"{_name(i)} {what}", timeout_s) for i, actor in asked),
            return_exceptions=True,
        )
        found = []
        for (index, actor), answer in zip(asked, answers, strict=True):
            if isinstance(answer, (ProcessDied, DeadlineExceeded)):
                # Another may stand in its place by now.
                if self._handles.get(index) is actor:
                    self.replace(index, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append((index, answer))
        return found

    @property
    def serving(self) -> list[int]:
        """The actors that serve a version."""
        return sorted(self._serving)

    def blamed(self, waited: DeadlineExceeded) -> CounterflowError:
        """Why somebody waited in vain for groups: where no actor serves, that there is none."""
        if self._serving:
            return waited
        lost = "; ".join(f"{_name(i)}: {first_line(self._losses[i])}" for i in sorted(self._losses))
        return RunFailed(f"no actor generates, {waited} ({lost}): see why none could be replaced in time")

    def goodbyes(self) -> list[Any]:
        """Ask every actor to stop; returns what Ray waits on."""
        return [handle.stop.remote() for handle in self._handles.values()]

    def remove_shared_memory(self) -> None:
        """Remove what the engines could not, where they were killed. When all have ended."""
        for index in list(self._segments):
            self._unlink(index)

    async def close(self) -> None:
        """Replace no more, and let nobody join or leave."""
        tasks = [*self._replacing.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _replace(self, index: int, error: Exception) -> None:
        failure: Exception | None = error
        while failure is not None:
            if self.restarts == self._config.actors.max_restarts:
                await self._give_up(index, failure)
                return
            self.restarts += 1
            self._telemetry.event("actor_lost", actor=index, error=first_line(failure))
            self._telemetry.note(f"{_name(index)} is replaced ({first_line(failure)})")
            await self._kill(index)
            failure = await self._try(index)
        self._telemetry.note(f"{_name(index)} serves again, version {self._delivery.served}")

    async def _give_up(self, index: int, failure: Exception) -> None:
        """Go on without the actor.

        Raises:
            RunFailed: it was the last one.
        """
        lost = f"{_name(index)} was lost, after {self.restarts} replacements (actors.max_restarts): {failure}"
        self._members.discard(index)
        await self._kill(index)
        if not self._members:
            raise RunFailed(f"no actor is left to generate: {lost}") from failure
        self._room.give_back(index)
        self._telemetry.event("actor_given_up", actor=index, error=first_line(failure))
        self._telemetry.note(f"{lost}; the run goes on with {len(self._members)}")

    async def _add(self, index: int) -> None:
        """Have a new actor serve, where there is room for it."""
        try:
            await self._room.place(index)
        except PlacementError as error:
            self._members.discard(index)
            self._telemetry.note(f"{_name(index)} cannot join, the run goes on with {len(self._members)}: {error}")
            return
        if (failure := await self._try(index)) is not None:
            await self._replace(index, failure)
        elif index in self._serving:
            self._telemetry.event("actor_joined", actor=index)
            self._telemetry.note(f"{_name(index)} has joined, version {self._delivery.served}")

    async def _leave(self, index: int) -> None:
        """Let an actor finish its groups, then end it. It still counts for a version that is on its way to it."""
        if index in self._replacing:
            await asyncio.wait([self._replacing[index]])
        self._serving.discard(index)
        async with self._delivery.hold:
            self._delivery.leave(_name(index))
        if index not in self._handles:
            # There was no room for it.
            self._room.give_back(index)
            return
        # Past its lease, another actor generates what this one did not finish.
        deadline_s = self._config.admission.lease_s
        try:
            state = await call(self._handles[index].leave.remote(), f"{_name(index)} to finish its groups", deadline_s)
            self._telemetry.actors([(index, state)])
        except (RunFailed, DeadlineExceeded) as error:
            self._telemetry.note(f"{_name(index)} left groups behind: {first_line(error)}")
        await self._kill(index)
        self._room.give_back(index)
        self._telemetry.event("actor_left", actor=index)
        self._telemetry.note(f"{_name(index)} has left")

    async def _kill(self, index: int) -> None:
        import ray

        if (handle := self._handles.pop(index, None)) is not None:
            # An engine that hangs, or is stopped, does not see its actor go.
            with suppress(CounterflowError):
                await call(handle.end.remote(), f"{_name(index)} to end its processes", _END_S)
            ray.kill(handle, no_restart=True)
            await asyncio.to_thread(self._expire, _name(index))
        self._unlink(index)

    async def _try(self, index: int) -> Exception | None:
        """Have a new process serve in the actor's place; why it does not, None if it does.

        Raises whatever the learner dies of: that is not the actor's fault, and ends the run.
        """
        try:
            actor = await self._process(index)
        except CounterflowError as error:
            return error
        joined = await self._join(index, actor)
        try:
            if joined and self._begun:
                await call(actor.begin.remote(), f"{_name(index)} to begin", _ANSWER_TIMEOUT_S)
        except (RunFailed, DeadlineExceeded) as error:
            self._delivery.leave(_name(index))
            return error
        if _name(index) not in self._delivery.actors:
            return self._losses[index]
        self._serving.add(index)
        return None

    async def _start(self, index: int) -> None:
        actor = await self._process(index)
        await self._join(index, actor)
        self._serving.add(index)

    async def _process(self, index: int) -> Any:
        """A new process in the actor's place, its engine at version 0."""
        self._handles[index] = actor = self._spawn(index, await self._room.place(index))
        reason = f"{_name(index)} to start its engine"
        self._segments[index] = await call(actor.start.remote(self._layout), reason, self._config.run.start_timeout_s)
        return actor

    def _unlink(self, index: int) -> None:
        for path in self._segments.pop(index, ()):
            path.unlink(missing_ok=True)

    async def _join(self, index: int, actor: Any) -> bool:
        call_s = self._config.weight_sync.timeout_s
        recipient = _Recipient(index, actor, call_s, self._telemetry)
        return await self._delivery.join(_name(index), recipient, partial(self.replace, index))


class _Recipient:
    """An actor as delivery calls it: through Ray, each call under a deadline. Errors leave its name to the fleet."""

    def __init__(self, index: int, actor: Any, timeout_s: float, telemetry: Telemetry) -> None:
        self._index, self._actor, self._timeout_s, self._telemetry = index, actor, timeout_s, telemetry

    async def load(self, shipment: Shipment) -> Sequence[Fingerprints]:
        """Pause and load a version."""
        reason = f"policy version {shipment.version} to be loaded"
        held: list[Fingerprints] = await call(self._actor.load.remote(shipment), reason, self._timeout_s)
        return held

    async def serve(self, version: int) -> None:
        """Go on with it."""
        await call(self._actor.serve.remote(version), f"policy version {version} to be served", self._timeout_s)
        self._telemetry.event("version_served", policy_version=version, actor=self._index)


def _name(index: int) -> str:
    """What Delivery calls the actor."""
    return f"actor {index}"
