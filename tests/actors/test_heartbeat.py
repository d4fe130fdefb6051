"""An engine that hangs is taken for one at work, or one at work for one that hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from counterflow.actors import heartbeat
from counterflow.actors.heartbeat import Heartbeat
from counterflow.errors import ProcessDied


class Patient:
    """What a heartbeat asks of an engine."""

    def __init__(self) -> None:
        self.version, self.serving, self.answers = 0, True, True
        self.died: Exception | None = None

    def check(self) -> None:
        if self.died:
            raise self.died

    async def pulse(self) -> None:
        while not (self.answers and self.serving):
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.01)


async def outlives(patient: Any, timeout_s: float, for_s: float) -> bool:
    heart = Heartbeat(patient, timeout_s)
    try:
        async with asyncio.timeout(for_s):
            while True:
                heart.check()
                await asyncio.sleep(0.01)
    except TimeoutError:
        return True
    finally:
        heart.stop()


def test_hanging_engine_lives_on() -> None:
    patient = Patient()
    patient.answers = False
    with pytest.raises(ProcessDied, match="hangs: it said nothing for 0.2 s"):
        asyncio.run(outlives(patient, 0.2, for_s=60))


def test_engine_that_loads_or_works_is_taken_for_one_that_hangs() -> None:
    async def scenario() -> None:
        patient = Patient()
        assert await outlives(patient, 0.3, for_s=0.6)
        patient.serving = False
        assert await outlives(patient, 0.1, for_s=0.6)

        async def versions_come() -> None:
            while True:
                patient.serving = False
                await asyncio.sleep(0.4)
                patient.version, patient.serving = patient.version + 1, True
                await asyncio.sleep(0.02)

        coming = asyncio.create_task(versions_come())
        assert await outlives(patient, 0.2, for_s=1.5)
        coming.cancel()

    asyncio.run(scenario())


def test_death_is_told_only_at_the_next_beat() -> None:
    patient = Patient()
    patient.died = ProcessDied("the engine's process died")
    with pytest.raises(ProcessDied, match="process died"):
        asyncio.run(outlives(patient, 60.0, for_s=60))
