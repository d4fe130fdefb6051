"""The actors of a run: started, made receivers of weights, watched, and replaced when they die.

Handles of Ray actors are held here and nowhere else. Lives in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from counterflow.actors.rollout import ActorState
from counterflow.cluster import call
from counterflow.configs.schema import RunConfig
from counterflow.errors import DeadlineExceeded, ProcessDied, RunFailed, first_line
from counterflow.telemetry import Telemetry
from counterflow.weight_sync.delivery import Delivery
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.publisher import Shipment

_ANSWER_TIMEOUT_S = 60.0


class Fleet:
    """All actors of a run.

    Args:
        spawn: makes the process of the i-th actor, in its place on the cluster.
        delivery: brings every actor its versions.
    """

    def __init__(
        self, config: RunConfig, spawn: Callable[[int], Any], delivery: Delivery, telemetry: Telemetry
    ) -> None:
        self._config, self._spawn, self._delivery, self._telemetry = config, spawn, delivery, telemetry
        self._handles: dict[int, Any] = {}
        self._losses: dict[int, Exception] = {}
        self._segments: dict[int, set[Path]] = {}
        self._serving: set[int] = set()
        self._replacing: dict[int, asyncio.Task[None]] = {}
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
        if index in self._replacing and not self._replacing[index].done():
            return
        self._serving.discard(index)
        self._delivery.leave(_name(index))
        self._replacing[index] = asyncio.create_task(self._replace(index, error))

    def check(self) -> None:
        """Raise why an actor could not be replaced, if that happened."""
        for index, task in list(self._replacing.items()):
            if task.done():
                del self._replacing[index]
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
                if self._handles[index] is actor:
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

    def goodbyes(self) -> list[Any]:
        """Ask every actor to stop; returns what Ray waits on."""
        return [handle.stop.remote() for handle in self._handles.values()]

    def remove_shared_memory(self) -> None:
        """Remove what the engines could not, where they were killed. When all have ended."""
        for index in list(self._segments):
            self._unlink(index)

    async def close(self) -> None:
        """Replace no more."""
        tasks = list(self._replacing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _replace(self, index: int, error: Exception) -> None:
        import ray

        failure: Exception | None = error
        while failure is not None:
            if self.restarts == self._config.actors.max_restarts:
                raise RunFailed(
                    f"{_name(index)} was lost, after {self.restarts} replacements (actors.max_restarts): {failure}"
                ) from failure
            self.restarts += 1
            self._telemetry.event("actor_lost", actor=index, error=first_line(failure))
            self._telemetry.note(f"{_name(index)} is replaced ({first_line(failure)})")
            ray.kill(self._handles[index], no_restart=True)
            self._unlink(index)
            failure = await self._try(index)
        self._telemetry.note(f"{_name(index)} serves again, version {self._delivery.served}")

    async def _try(self, index: int) -> Exception | None:
        """Have a new process serve in the actor's place; why it does not, None if it does.

        Raises whatever the learner dies of: that is not the actor's fault, and ends the run.
        """
        try:
            actor = await self._process(index)
        except (RunFailed, DeadlineExceeded) as error:
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
        self._handles[index] = actor = self._spawn(index)
        reason = f"{_name(index)} to start its engine"
        self._segments[index] = await call(actor.start.remote(self._layout), reason, self._config.run.start_timeout_s)
        return actor

    def _unlink(self, index: int) -> None:
        for path in self._segments.pop(index, ()):
            path.unlink(missing_ok=True)

    async def _join(self, index: int, actor: Any) -> bool:
        call_s = self._config.weight_sync.timeout_s
        recipient = _Recipient(index, actor, call_s, self._telemetry)
        return await self._delivery.join(_name(index), recipient, partial(self._given_up, index))

    def _given_up(self, index: int, error: Exception) -> None:
        """An actor could not be brought a version: replace it."""
        self._losses[index] = error
        self.replace(index, error)


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
