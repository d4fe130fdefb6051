"""Delivery: versions arrive in order, one at a time, and a failure is never silent."""

from __future__ import annotations

import asyncio

import pytest

from counterflow.errors import DeadlineExceeded, WeightSyncError
from counterflow.weight_sync.delivery import Delivery
from counterflow.weight_sync.publisher import StagedVersion


class Learner:
    """A learner whose version the test moves, and an actor whose loading the test can hold up."""

    def __init__(self) -> None:
        self.version = 0
        self.slots: dict[int, int] = {}
        self.loaded: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def stage(self, slot: int) -> StagedVersion:
        await asyncio.sleep(0)
        self.slots[slot] = self.version
        return StagedVersion(self.version, slot, fingerprints={})

    async def load(self, staged: StagedVersion) -> int:
        await self.gate.wait()
        # What is in the slot when it is read must be what was announced.
        assert self.slots[staged.slot] == staged.version
        self.loaded.append(staged.version)
        return staged.version

    async def publish(self, delivery: Delivery, version: int) -> None:
        self.version = version
        await delivery.publish()


def test_staging_overwrites_the_version_on_its_way() -> None:
    async def main() -> None:
        learner = Learner()
        delivery = Delivery(learner.stage, [learner.load], timeout_s=5)
        learner.gate.clear()
        for version in range(1, 6):
            await learner.publish(delivery, version)
            await asyncio.sleep(0.001)
        learner.gate.set()
        await delivery.arrived()
        assert learner.loaded == [1, 5]
        assert (delivery.served, delivery.skipped) == (5, 3)

    asyncio.run(main())


def test_newest_version_never_arrives() -> None:
    async def main() -> None:
        learner = Learner()
        delivery = Delivery(learner.stage, [learner.load, learner.load], timeout_s=5)
        for version in range(1, 20):
            await learner.publish(delivery, version)
            if version % 3 == 0:
                await asyncio.sleep(0.001)
        await delivery.arrived()
        assert delivery.served == 19 and learner.loaded == sorted(learner.loaded)

    asyncio.run(main())


def test_version_changes_while_it_is_held() -> None:
    async def main() -> None:
        learner = Learner()
        delivery = Delivery(learner.stage, [learner.load], timeout_s=5)
        async with delivery.hold:
            for version in (1, 2):
                await learner.publish(delivery, version)
                await asyncio.sleep(0.001)
            assert (delivery.served, learner.loaded) == (0, [])
        await delivery.arrived()
        assert learner.loaded == [2]

    asyncio.run(main())


def test_actor_that_never_loads_hangs_the_run() -> None:
    async def main() -> None:
        learner = Learner()
        delivery = Delivery(learner.stage, [learner.load], timeout_s=0.05)
        learner.gate.clear()
        await learner.publish(delivery, 1)
        with pytest.raises(DeadlineExceeded, match="weight sync waited 0.05 s for policy version 1"):
            await delivery.arrived()

    asyncio.run(main())


def test_failed_load_is_silent() -> None:
    async def refuse(staged: StagedVersion) -> int:
        raise WeightSyncError("checksum")

    async def main() -> None:
        learner = Learner()
        delivery = Delivery(learner.stage, [learner.load, refuse], timeout_s=5)
        await learner.publish(delivery, 1)
        await asyncio.sleep(0.01)
        assert delivery.served == 0
        with pytest.raises(WeightSyncError):
            await learner.publish(delivery, 2)

    asyncio.run(main())
