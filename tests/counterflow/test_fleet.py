"""Actors join, leave, die and load versions at any moment: the fleet ends as it is to be, and nobody is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from counterflow.actors.rollout import ActorState
from counterflow.configs.schema import RunConfig
from counterflow.errors import DeadlineExceeded, PlacementError, RunFailed
from counterflow.fleet import Fleet
from counterflow.weight_sync.delivery import Delivery
from counterflow.weight_sync.fingerprint import Fingerprint, Fingerprints
from counterflow.weight_sync.publisher import Shipment, StagedVersion

ROOM = 5
"""Actors that have a place."""


class Call:
    """A method of an actor, as Ray has it called."""

    def __init__(self, remote: Callable[..., Awaitable[Any]]) -> None:
        self.remote = remote


class Actor:
    """An actor in this process: it may die, and then never answers but with its death."""

    def __init__(self, world: World, index: int, place: int) -> None:
        self.world, self.index, self.place = world, index, place
        self.dead = self.left = self.begun = False
        self.version, self.refusal = 0, world.refusal

    def __getattr__(self, name: str) -> Call:
        async def answer(*arguments: Any) -> Any:
            self.alive()
            for _ in range(self.world.pace.draw(st.integers(0, 3))):
                await asyncio.sleep(0)
                self.alive()
            return getattr(self, f"on_{name}")(*arguments)

        return Call(answer)

    def alive(self) -> None:
        if self.dead:
            raise ray.exceptions.RayActorError()
        if self.refusal:
            raise ray.exceptions.RayError(self.refusal)

    def on_start(self, layout: object) -> set[Any]:
        return set()

    def on_begin(self) -> None:
        self.begun = True

    def on_load(self, shipment: Shipment) -> list[Fingerprints]:
        self.loaded = shipment.version
        return [{"norm": Fingerprint(shipment.version, 0)}]

    def on_serve(self, version: int) -> None:
        assert self.loaded == version
        self.version = version

    def on_state(self) -> ActorState:
        return ActorState({}, None, [], None)

    def on_end(self) -> None:
        """It has no process of its own."""

    def on_leave(self) -> ActorState:
        self.left = True
        return self.on_state()


class Telemetry:
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def event(self, event: str, **fields: object) -> None:
        """Not looked at."""

    def actors(self, states: object) -> None:
        """Not looked at."""

    def retried(self, actor: str, error: Exception) -> None:
        """Not looked at."""


class World:
    """A learner, room for actors, and the fleet between them."""

    def __init__(self, pace: Any, restarts: int = 1000) -> None:
        self.pace, self.version, self.refusal = pace, 0, ""
        self.actors: list[Actor] = []
        self.reserved: set[int] = set()
        self.telemetry = Telemetry()
        config = RunConfig.model_validate({"actors": {"count": 2, "max_restarts": restarts}})
        self.delivery = Delivery(self, False, self.telemetry.retried)
        self.fleet = Fleet(config, self, self.spawn, self.delivery, lambda name: None, self.telemetry)  # type: ignore[arg-type]

    async def place(self, index: int) -> int:
        await asyncio.sleep(0)
        if index not in self.reserved and len(self.reserved) == ROOM:
            raise PlacementError("there is no room")
        self.reserved.add(index)
        return index

    def give_back(self, index: int) -> None:
        self.reserved.discard(index)

    def spawn(self, index: int, place: int) -> Actor:
        assert not [a for a in self.living if a.index == index], "two processes in one place"
        assert place in self.reserved
        self.actors.append(Actor(self, index, place))
        return self.actors[-1]

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.dead]

    async def stage(self, slot: int) -> StagedVersion:
        return StagedVersion(self.version, slot)

    async def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        await asyncio.sleep(0)
        return Shipment(staged.version, {})

    async def send(self, staged: StagedVersion) -> Fingerprints:
        await asyncio.sleep(0)
        return {"norm": Fingerprint(staged.version, 0)}

    async def publish(self) -> None:
        self.version += 1
        await self.delivery.publish()

    async def settle(self) -> None:
        """Look after the fleet as a supervisor does, until nothing is on its way."""
        for _ in range(1000):
            await self.fleet.states()
            self.fleet.check()
            if not self.fleet._replacing and not self.fleet._leaving:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError("the fleet does not come to rest")
        await self.delivery.arrived()


@pytest.fixture(autouse=True)
def kill(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(actor: Actor, no_restart: bool) -> None:
        actor.dead = True

    async def to_thread(function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    monkeypatch.setattr(ray, "kill", kill)
    # A history takes the same course each time.
    monkeypatch.setattr(asyncio, "to_thread", to_thread)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("resize"), st.integers(1, 8)),
        st.tuples(st.just("die"), st.integers(0, 7)),
        st.tuples(st.just("publish"), st.just(0)),
        st.tuples(st.just("look"), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 20)),
    ),
    max_size=30,
)


@given(operations=OPERATIONS, pace=st.data())
def test_some_history_leaves_an_actor_behind(operations: list[tuple[str, int]], pace: Any) -> None:
    async def scenario() -> None:
        world = World(pace)
        await world.fleet.start(None)  # type: ignore[arg-type]
        await world.fleet.begin()
        asked = 2
        for name, number in operations:
            if name == "resize":
                asked = number
                world.fleet.resize(number)
            elif name == "die" and number < len(world.living):
                world.living[number].dead = True
            elif name == "publish":
                await world.publish()
            elif name == "look":
                await world.fleet.states()
                world.fleet.check()
            else:
                for _ in range(number):
                    await asyncio.sleep(0)
        await world.settle()
        await world.publish()
        await world.settle()
        serving, living = world.fleet.serving, world.living
        assert len(serving) == world.fleet.wanted and sorted(actor.index for actor in living) == serving
        assert {actor.version for actor in living} == {world.version}
        assert all(actor.begun and not actor.left for actor in living)
        assert set(world.delivery.actors) == {f"actor {i}" for i in serving}
        assert world.reserved == set(serving)
        # Those who found no room were let go of, and nobody else was.
        assert len(serving) == asked or (
            len(serving) < asked and any("no room" in note for note in world.telemetry.notes)
        )
        await world.fleet.close()

    asyncio.run(scenario())


def lost(pace: Any, count: int) -> tuple[World, list[str]]:
    """A world in which actors die and none is replaced, and what the run ended with."""
    world, ends = World(pace, restarts=0), []

    async def scenario() -> None:
        await world.fleet.start(None)  # type: ignore[arg-type]
        await world.fleet.begin()
        for actor in world.living[:count]:
            actor.dead = True
        try:
            await world.settle()
        except RunFailed as error:
            ends.append(str(error))
        await world.fleet.close()

    asyncio.run(scenario())
    return world, ends


@given(pace=st.data())
def test_one_of_two_that_is_not_replaced_ends_the_run(pace: Any) -> None:
    world, ends = lost(pace, 1)
    assert ends == [] and world.fleet.serving == [1] and "the run goes on with 1" in world.telemetry.notes[-1]
    waited = DeadlineExceeded("the learner", "groups", 3.0)
    assert world.fleet.blamed(waited) is waited


@given(pace=st.data())
def test_actor_that_says_why_it_cannot_begin_ends_the_run(pace: Any) -> None:
    async def scenario() -> None:
        world = World(pace, restarts=1)
        await world.fleet.start(None)  # type: ignore[arg-type]
        await world.fleet.begin()
        world.refusal = "The actor died.\ncounterflow.errors.BufferUnavailable: there is no such file of certificates"
        world.fleet.resize(3)
        await world.settle()
        assert world.fleet.serving == [0, 1] and "no such file of certificates" in world.telemetry.notes[-1]

    asyncio.run(scenario())


@given(pace=st.data())
def test_last_of_all_is_waited_for(pace: Any) -> None:
    world, ends = lost(pace, 2)
    assert len(ends) == 1 and ends[0].startswith("no actor is left to generate: actor ")
    said = str(world.fleet.blamed(DeadlineExceeded("the learner", "groups", 3.0)))
    assert "no actor generates, the learner waited 3 s for groups (actor 0: " in said and "actor 1: " in said


@given(pace=st.data())
def test_actor_that_left_is_still_sent_versions(pace: Any) -> None:
    async def scenario() -> None:
        world = World(pace)
        await world.fleet.start(None)  # type: ignore[arg-type]
        await world.publish()
        world.fleet.resize(1)
        await world.settle()
        assert world.delivery.actors == ("actor 0",) and world.actors[1].left and world.actors[1].dead
        # It took part in what was on its way when it was to leave.
        assert world.actors[1].version in (0, 1) and not world.fleet._losses and world.fleet.restarts == 0

    asyncio.run(scenario())
