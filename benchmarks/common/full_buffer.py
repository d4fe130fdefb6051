"""A learner whose buffer is full from the start: what share of its time it waits for groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.trajectory import Group, Origin
from counterflow.configs.schema import RunConfig
from counterflow.learner.learner import Learner


def waiting_share(config: RunConfig, folder: Path, groups: Sequence[Group], steps: int) -> float:
    """Seconds waited over seconds of so many steps, all of whose groups are there. The first step does not count."""
    origin = Origin("full", "model", "tokenizer", "{}")
    with EmbeddedServer(folder / "buffer", timeout_s=20) as server:
        asyncio.run(_offer(server.address, origin, groups, config.admission.groups_per_step))
        learner = Learner(folder, config, server.address, origin, time.time(), cores=None)
        with closing(learner):
            records = [learner.step().record for _ in range(steps)][1:]
    waited, trained = sum(record.wait_s for record in records), sum(record.train_s for record in records)
    return waited / (waited + trained)


async def _offer(address: Address, origin: Origin, groups: Sequence[Group], groups_per_step: int) -> None:
    capacity = Capacity(groups=len(groups) + 1, bytes=8 << 30, groups_per_step=groups_per_step)
    producer = Producer(address, origin.run_id, capacity=capacity, lease_s=600, attempts=9)
    await producer.admit(len(groups), wanted=len(groups))
    for group in groups:
        assert await producer.add(group, encode(group, origin.schema()))
    await producer.close()
