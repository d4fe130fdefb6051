"""The stream on a real server: each group is trained once, in admission order, and every one is accounted for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from conftest import make_group

from counterflow.buffer.connection import Address, connect
from counterflow.buffer.store import Consumer, Keys, Producer, read_ledger
from counterflow.buffer.trajectory import Origin, encode
from counterflow.errors import BufferUnavailable, DeadlineExceeded

T = TypeVar("T")


def produce(
    server: Address,
    origin: Origin,
    body: Callable[[Producer], Awaitable[T]],
    *,
    lease_s: float = 60,
    capacity: int = 99,
) -> T:
    async def main() -> T:
        producer = Producer(server, origin.run_id, capacity_groups=capacity, lease_s=lease_s, attempts=2)
        try:
            return await body(producer)
        finally:
            await producer.close()

    return asyncio.run(main())


async def add(producer: Producer, origin: Origin, admission: int) -> bool:
    group = make_group(admission)
    return await producer.add(admission, group.response_tokens, encode(group, origin.schema()))


async def lease_all(producer: Producer, open_groups: int) -> list[int]:
    leases = []
    while (lease := await producer.admit(open_groups)) is not None:
        leases.append(lease.admission)
    return leases


def fill(server: Address, origin: Origin, order: list[int]) -> None:
    async def body(producer: Producer) -> None:
        assert await lease_all(producer, len(order)) == list(range(len(order)))
        for n in order:
            assert await add(producer, origin, n)

    produce(server, origin, body)


def test_groups_that_arrive_out_of_order_are_trained_out_of_order(server: Address, origin: Origin) -> None:
    fill(server, origin, [3, 1, 0, 2])
    consumer = Consumer(server, origin.run_id, origin)
    assert [e.group.admission for e in consumer.take(4, timeout_s=5)] == [0, 1, 2, 3]


def test_group_added_twice_is_kept_twice(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    assert produce(server, origin, lambda p: add(p, origin, 0)) is False
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.buffered, ledger.dropped, ledger.generated) == (2, {"duplicate": 1}, 3)
    assert ledger.closes


def test_group_of_a_lost_lease_is_never_generated(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[tuple[int, int]]:
        first = await producer.admit(1)
        assert first is not None and await producer.admit(1) is None
        await asyncio.sleep(0.06)
        again = await producer.admit(1)
        assert again is not None
        return [(first.admission, first.attempt), (again.admission, again.attempt)]

    assert produce(server, origin, body, lease_s=0.05) == [(0, 1), (0, 2)]


def test_late_group_of_a_lost_lease_is_kept_beside_the_new_one(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await producer.admit(1)
        await asyncio.sleep(0.06)
        await producer.admit(1)
        return [await add(producer, origin, 0), await add(producer, origin, 0)]

    assert produce(server, origin, body, lease_s=0.05) == [True, False]
    assert read_ledger(server, origin.run_id).closes


def test_prompt_that_always_fails_wedges_a_step(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await lease_all(producer, 2)
        retried = [await producer.fail(0, 5)]
        lease = await producer.admit(2)
        assert lease is not None and (lease.admission, lease.attempt) == (0, 2)
        retried.append(await producer.fail(0, 5))
        # The dropped group makes room for another one.
        assert await lease_all(producer, 2) == [2]
        await add(producer, origin, 2)
        await add(producer, origin, 1)
        return retried

    assert produce(server, origin, body) == [True, False]
    consumer = Consumer(server, origin.run_id, origin)
    assert [e.group.admission for e in consumer.take(2, timeout_s=5)] == [1, 2]
    ledger = read_ledger(server, origin.run_id)
    assert ledger.dropped == {"poison": 1}
    assert ledger.tokens_dropped == {"failed": 10}
    assert ledger.closes


def test_full_buffer_admits_more(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> tuple[list[int], list[int]]:
        leases = await lease_all(producer, 99)
        for n in leases:
            await add(producer, origin, n)
        return leases, await lease_all(producer, 99)

    assert produce(server, origin, body, capacity=3) == ([0, 1, 2], [])
    consumer = Consumer(server, origin.run_id, origin)
    consumer.commit(consumer.take(1, timeout_s=5), version=1)
    assert produce(server, origin, lambda p: lease_all(p, 99), capacity=3) == [3]


def test_ledger_loses_a_group_on_its_way(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2, 3])
    consumer = Consumer(server, origin.run_id, origin)
    consumer.commit(consumer.take(3, timeout_s=5), version=1)
    produce(server, origin, lambda p: lease_all(p, 6))
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.generated, ledger.trained, ledger.buffered, ledger.in_flight) == (6, 3, 1, 2)
    assert (ledger.tokens_generated, ledger.tokens_trained, ledger.tokens_buffered) == (24, 18, 6)
    assert ledger.closes


def test_learner_killed_before_its_commit_loses_or_repeats_groups(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2, 3])
    first = Consumer(server, origin.run_id, origin)
    first.commit(first.take(2, timeout_s=5), version=1)
    first.take(2, timeout_s=5)
    # The process dies here, with two groups read and not committed.
    second = Consumer(server, origin.run_id, origin)
    assert second.version == 1
    entries = second.take(2, timeout_s=5)
    assert [e.group.admission for e in entries] == [2, 3]
    second.commit(entries, version=2)
    assert read_ledger(server, origin.run_id).trained == 4


def test_step_is_committed_twice(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    consumer = Consumer(server, origin.run_id, origin)
    entries = consumer.take(2, timeout_s=5)
    consumer.commit(entries, version=1)
    with pytest.raises(BufferUnavailable, match="was trained or dropped before"):
        consumer.commit(entries, version=2)
    with pytest.raises(BufferUnavailable, match="version 1 does not follow 1"):
        consumer.commit(entries, version=1)
    assert read_ledger(server, origin.run_id).trained == 2


def test_foreign_entry_stops_the_run(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 2)
        await producer.add(0, 6, b"not arrow")
        await add(producer, origin, 1)
        assert await lease_all(producer, 2) == []

    produce(server, origin, body)
    consumer = Consumer(server, origin.run_id, origin)
    assert [e.group.admission for e in consumer.take(1, timeout_s=5)] == [1]
    ledger = read_ledger(server, origin.run_id)
    assert ledger.dropped == {"poison": 1} and ledger.closes
    client = connect(server)
    ((_, quarantined),) = client.xrange(Keys.of(origin.run_id).quarantine)
    client.close()
    assert b"not an Arrow group" in quarantined[b"reason"] and quarantined[b"payload"] == b"not arrow"


def test_learner_waits_for_ever(server: Address, origin: Origin) -> None:
    consumer = Consumer(server, origin.run_id, origin)
    start = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match="the learner waited 0.3 s for 1 of 1 groups, the first of them number 0"
    ):
        consumer.take(1, timeout_s=0.3)
    assert time.monotonic() - start >= 0.3
