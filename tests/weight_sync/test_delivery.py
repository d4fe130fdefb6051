"""Delivery: versions arrive in order, one at a time, whoever dies or joins, and a failure is never silent."""

from __future__ import annotations

import asyncio
import random as randomness
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterflow.errors import DeadlineExceeded, ProcessDied, WeightSyncError
from counterflow.weight_sync.delivery import Delivery
from counterflow.weight_sync.fingerprint import Fingerprint, Fingerprints
from counterflow.weight_sync.publisher import Shipment, StagedVersion


class Learner:
    """A learner whose version the test moves, with actors whose loading the test can hold up or spoil."""

    def __init__(self, together: bool = False) -> None:
        self.version = 0
        self.slots: dict[int, int] = {}
        self.loaded: dict[str, list[int]] = {}
        self.holds: dict[str, int | None] = {}
        self.errors: dict[str, list[Exception]] = {}
        self.lost: list[tuple[str, str]] = []
        self.spoilt: dict[str, int] = {}
        self.told: list[tuple[str, str]] = []
        self.sends: list[Exception] = []
        self.leaving: list[str] = []
        self.breaking: list[str] = []
        self.receivers: set[str] = set()
        self.on_send: Callable[[], object] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.delivery = Delivery(self, together, lambda actor, error: self.told.append((actor, str(error))))

    async def stage(self, slot: int) -> StagedVersion:
        await asyncio.sleep(0)
        self.slots[slot] = self.version
        return StagedVersion(self.version, slot)

    async def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        await asyncio.sleep(0)
        self.receivers = set(actors)
        return Shipment(staged.version, {"slot": staged.slot, "actors": list(actors)})

    async def send(self, staged: StagedVersion) -> Fingerprints:
        self.on_send()
        await self.gate.wait()
        if self.leaving:
            self.delivery.leave(self.leaving.pop(0))
        if self.sends:
            raise self.sends.pop(0)
        # A sender does not lose whom it does not send to.
        if breaking := next((actor for actor in self.breaking if actor in self.receivers), None):
            self.breaking.remove(breaking)
            raise WeightSyncError(f"{breaking}/0 died", [f"{breaking}/0"])
        return {"norm": Fingerprint(staged.version, 0)}

    async def join(self, *actors: str) -> None:
        for actor in actors:
            await self.join_one(actor)

    async def join_one(self, actor: str) -> bool:
        return await self.delivery.join(actor, Actor(self, actor), lambda error: self.lost.append((actor, str(error))))

    async def publish(self, version: int) -> None:
        self.version = version
        await self.delivery.publish()


@dataclass
class Actor:
    """One of the learner's actors. A load that fails leaves it paused, with weights of no version."""

    learner: Learner
    name: str

    async def load(self, shipment: Shipment) -> list[Fingerprints]:
        learner = self.learner
        await learner.gate.wait()
        learner.holds[self.name] = None
        if learner.errors.get(self.name):
            raise learner.errors[self.name].pop(0)
        # What is in the slot when it is read must be what was announced.
        found = learner.slots[shipment.way["slot"]]
        assert found == shipment.version
        learner.loaded.setdefault(self.name, []).append(found)
        return [{"norm": Fingerprint(found + learner.spoilt.pop(self.name, 0), 0)}]

    async def serve(self, version: int) -> None:
        self.learner.holds[self.name] = version


def test_staging_overwrites_the_version_on_its_way() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0")
        learner.gate.clear()
        for version in range(1, 6):
            await learner.publish(version)
            await asyncio.sleep(0.001)
        learner.gate.set()
        await learner.delivery.arrived()
        assert learner.loaded == {"actor 0": [1, 5]}
        assert (learner.delivery.served, learner.delivery.skipped) == (5, 3)

    asyncio.run(main())


def test_newest_version_never_arrives() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0", "actor 1")
        for version in range(1, 20):
            await learner.publish(version)
            if version % 3 == 0:
                await asyncio.sleep(0.001)
        await learner.delivery.arrived()
        assert learner.delivery.served == 19
        assert all(loaded == sorted(loaded) and loaded[-1] == 19 for loaded in learner.loaded.values())

    asyncio.run(main())


def test_version_changes_while_it_is_held() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0")
        async with learner.delivery.hold:
            for version in (1, 2):
                await learner.publish(version)
                await asyncio.sleep(0.001)
            assert (learner.delivery.served, learner.loaded) == (0, {})
        await learner.delivery.arrived()
        assert learner.loaded == {"actor 0": [2]}

    asyncio.run(main())


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("error", [ProcessDied("killed"), DeadlineExceeded("supervisor", "an actor", 1.0)])
def test_actor_that_dies_takes_the_others_down(together: bool, error: Exception) -> None:
    async def main() -> None:
        learner = Learner(together)
        await learner.join("actor 0", "actor 1")
        learner.errors["actor 1"] = [error]
        await learner.publish(1)
        await learner.delivery.arrived()
        assert (learner.delivery.served, learner.delivery.actors) == (1, ("actor 0",))
        assert learner.lost == [("actor 1", str(error))]
        await learner.publish(2)
        await learner.delivery.arrived()
        assert learner.loaded["actor 0"] == [1, 2] and learner.delivery.served == 2

    asyncio.run(main())


def test_second_load_that_succeeds_loses_the_actor() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0", "actor 1")
        learner.errors["actor 0"] = [WeightSyncError("other weights")]
        await learner.publish(1)
        await learner.delivery.arrived()
        assert learner.loaded == {"actor 0": [1], "actor 1": [1]}
        assert (learner.lost, learner.delivery.repeated) == ([], 1)
        learner.errors["actor 0"] = [WeightSyncError("other weights"), WeightSyncError("still others")]
        await learner.publish(2)
        await learner.delivery.arrived()
        assert learner.lost == [("actor 0", "still others")]
        assert (learner.delivery.served, learner.delivery.actors) == (2, ("actor 1",))

    asyncio.run(main())


def test_broadcast_blames_those_that_gave_up_because_of_another() -> None:
    async def main() -> None:
        learner = Learner(together=True)
        await learner.join("actor 0", "actor 1")
        learner.errors = {"actor 0": [WeightSyncError("gave up")], "actor 1": [WeightSyncError("gave up")] * 2}
        learner.sends = [WeightSyncError("actor 1/0 died", ["actor 1/0"])] * 2
        await learner.publish(1)
        await learner.delivery.arrived()
        assert learner.lost == [("actor 1", "actor 1/0 died")]
        assert learner.loaded["actor 0"][-1] == 1 and learner.delivery.served == 1

    asyncio.run(main())


def test_reload_that_fails_while_another_joins_is_forgotten() -> None:
    async def main() -> None:
        learner = Learner(together=True)
        await learner.join("actor 0", "actor 1")
        await learner.publish(1)
        await learner.delivery.arrived()
        learner.errors["actor 0"] = [WeightSyncError("a bucket was corrupted")]
        await learner.join("actor 2")
        assert set(learner.holds.values()) == {1} and learner.lost == []

    asyncio.run(main())


def test_innocents_are_given_up_for_one_that_left() -> None:
    async def main() -> None:
        learner = Learner(together=True)
        leavers = [f"actor {i}" for i in (2, 3, 4)]
        await learner.join("actor 0", "actor 1", *leavers)
        learner.errors = {name: [WeightSyncError("gave up")] * 3 for name in ("actor 0", "actor 1")}
        learner.sends = [WeightSyncError(f"{name}/0 left", [f"{name}/0"]) for name in leavers]
        # One leaves in each round.
        learner.leaving = list(leavers)
        await learner.publish(1)
        await learner.delivery.arrived()
        assert learner.lost == learner.told == []
        assert [learner.holds[name] for name in learner.delivery.actors] == [1, 1]

    asyncio.run(main())


def test_sender_that_blames_strangers_is_asked_for_ever() -> None:
    async def main() -> None:
        learner = Learner(together=True)
        await learner.join("actor 0", "actor 1")
        learner.sends = [WeightSyncError("no call from actor 9/0", ["actor 9/0"])] * 10
        await learner.publish(1)
        async with asyncio.timeout(5):
            await learner.delivery.arrived()
        assert {name for name, _ in learner.lost} == {"actor 0", "actor 1"} and len(learner.sends) == 8

    asyncio.run(main())


def test_actor_that_left_is_told_that_it_is_given_up() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0", "actor 1")
        learner.errors["actor 1"] = [ProcessDied("killed")]
        learner.leaving = ["actor 1"]
        await learner.publish(1)
        await learner.delivery.arrived()
        assert learner.lost == [] and learner.delivery.served == 1

    asyncio.run(main())


def test_weights_that_are_not_proved_are_served() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0", "actor 1")
        await learner.publish(1)
        await learner.delivery.arrived()
        learner.spoilt = {"actor 1": 7}
        served: list[int | None] = []
        learner.on_send = lambda: served.append(learner.holds["actor 1"])
        await learner.publish(2)
        await learner.delivery.arrived()
        # Between the two tries it served nothing.
        assert served == [1, None] and learner.holds["actor 1"] == 2
        ((actor, error),) = learner.told
        assert actor == "actor 1" and "policy version 2: the engine holds other weights" in error and "norm" in error

    asyncio.run(main())


def test_closing_leaves_the_sender_at_work() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0")
        learner.gate.clear()
        await learner.publish(1)
        await asyncio.sleep(0.01)
        before = asyncio.all_tasks()
        await learner.delivery.close()
        await asyncio.sleep(0)
        assert len(before) > 1 and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_learner_that_dies_while_one_joins_costs_the_joiner() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0")
        await learner.publish(1)
        await learner.delivery.arrived()
        learner.sends = [ProcessDied("the learner")]
        with pytest.raises(ProcessDied, match="the learner"):
            await learner.join("actor 1")
        assert learner.lost == [] and learner.delivery.actors == ("actor 0",)

    asyncio.run(main())


def test_joiner_serves_an_older_version_than_the_newest() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0")
        for version in range(1, 8):
            await learner.publish(version)
            await learner.delivery.arrived()
        await learner.join("actor 1")
        assert learner.loaded["actor 1"] == [7]

    asyncio.run(main())


def test_joiner_that_cannot_be_served_is_told_nothing() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.publish(1)
        await learner.delivery.arrived()
        learner.errors["actor 0"] = [ProcessDied("killed")]
        assert not await learner.join_one("actor 0")
        assert learner.delivery.actors == ()
        await learner.join("actor 0")
        assert learner.loaded == {"actor 0": [1]}

    asyncio.run(main())


def test_learner_that_dies_is_silent() -> None:
    async def main() -> None:
        learner = Learner()
        await learner.join("actor 0")
        learner.sends = [ProcessDied("the learner")]
        await learner.publish(1)
        with pytest.raises(ProcessDied, match="the learner"):
            await learner.delivery.arrived()
        with pytest.raises(ProcessDied, match="the learner"):
            await learner.publish(2)

    asyncio.run(main())


@example(False, ["publish", "wait", "vanish", "break", "break"], randomness.Random(0))
@settings(max_examples=60)
@given(
    st.booleans(),
    st.lists(
        st.sampled_from(["publish", "wait", "join", "leave", "vanish", "break", "spoil", "die", "refuse"]),
        min_size=1,
        max_size=25,
    ),
    st.randoms(use_true_random=False),
)
def test_some_history_leaves_an_actor_behind(together: bool, history: list[str], random: object) -> None:
    """Whoever comes and goes: those that are there at the end serve the newest version, each loaded in order."""

    async def main() -> None:
        learner = Learner(together)
        await learner.join("actor 0")
        names = iter(range(1, 100))
        for event in history:
            actors = learner.delivery.actors
            chosen = random.choice(actors) if actors else None  # type: ignore[attr-defined]
            if event == "publish":
                await learner.publish(learner.version + 1)
            elif event == "wait":
                await learner.delivery.arrived()
            elif event == "join":
                await learner.join(f"actor {next(names)}")
            elif chosen and event == "leave":
                learner.delivery.leave(chosen)
            elif chosen and event == "vanish":
                # In the middle of the next version.
                learner.leaving.append(chosen)
            elif chosen and event == "break":
                learner.breaking.append(chosen)
            elif chosen and event == "spoil":
                learner.spoilt[chosen] = 1
            elif chosen:
                learner.errors[chosen] = [ProcessDied("killed") if event == "die" else WeightSyncError("other weights")]
        await learner.join("actor 100")
        learner.breaking.clear()
        await learner.publish(learner.version + 1)
        await learner.delivery.arrived()
        assert learner.delivery.actors
        for actor in learner.delivery.actors:
            loaded = learner.loaded[actor]
            assert loaded == sorted(loaded)
            assert learner.holds[actor] == learner.version == learner.delivery.served

    asyncio.run(main())
