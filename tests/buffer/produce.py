"""What the buffer's tests share: a producer to drive, and a stream filled in some order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from groups import make_group

from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.store import Keys
from counterflow.buffer.trajectory import Origin

T = TypeVar("T")

ROOMY = Capacity(groups=999, bytes=1 << 30, groups_per_step=1)


def produce(
    server: Address,
    origin: Origin,
    body: Callable[[Producer], Awaitable[T]],
    *,
    lease_s: float = 60,
    capacity: Capacity = ROOMY,
) -> T:
    async def main() -> T:
        producer = Producer(server, origin.run_id, capacity=capacity, lease_s=lease_s, attempts=2)
        try:
            return await body(producer)
        finally:
            await producer.close()

    return asyncio.run(main())


async def add(producer: Producer, origin: Origin, admission: int, **made: int) -> bool:
    group = make_group(admission, **made)
    return await producer.add(group, encode(group, origin.schema()))


async def lease_all(producer: Producer, open_groups: int) -> list[int]:
    leases, _ = await producer.admit(open_groups, wanted=1000)
    return [lease.admission for lease in leases]


def fill(server: Address, origin: Origin, order: list[int]) -> None:
    async def body(producer: Producer) -> None:
        assert await lease_all(producer, len(order)) == list(range(len(order)))
        for n in order:
            assert await add(producer, origin, n)

    produce(server, origin, body)


def say_again(producer: Producer) -> None:
    """The producer's next call repeats the one before, whose reply was lost."""
    producer._calls -= 1


def expire_leases(server: Address, origin: Origin) -> None:
    """Let all leases run out."""
    with connect(server) as client:
        leases = Keys.of(origin.run_id).leases
        client.zadd(leases, dict.fromkeys(client.zrange(leases, 0, -1), 0))
