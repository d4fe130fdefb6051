"""The stream on a real server: each group is trained once, in admission order, and every one is accounted for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from groups import make_group
from produce import ROOMY, add, expire_leases, fill, lease_all, produce, say_again

from counterflow.buffer import store
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Capacity, Closed, Lease, Producer
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import Keys, finish, forget, read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.errors import BufferUnavailable, DeadlineExceeded


def test_groups_that_arrive_out_of_order_are_trained_out_of_order(server: Address, origin: Origin) -> None:
    fill(server, origin, [3, 1, 0, 2])
    consumer = Consumer(server, origin)
    assert [e.group.admission for e in consumer.take(4, timeout_s=5)] == [0, 1, 2, 3]


def test_group_added_twice_is_kept_twice(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    assert produce(server, origin, lambda p: add(p, origin, 0)) is False
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.buffered, ledger.dropped, ledger.generated) == (2, {"duplicate": 1}, 3)
    assert ledger.closes


def test_group_of_a_lost_lease_is_never_generated(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[Lease]:
        first, _ = await producer.admit(1, wanted=2)
        assert await producer.admit(1, wanted=1) == ([], Closed.LAG_BUDGET)
        expire_leases(server, origin)
        again, _ = await producer.admit(1, wanted=2)
        return first + again

    assert produce(server, origin, body) == [Lease(0, 1), Lease(0, 2)]
    assert read_ledger(server, origin.run_id).reissued == 1


def test_groups_of_an_actor_that_died_wait_for_their_leases(server: Address, origin: Origin) -> None:
    async def main() -> list[list[int]]:
        producers = [
            Producer(server, origin.run_id, capacity=ROOMY, lease_s=600, attempts=9, holder=holder)
            for holder in ("actor 1", "actor 10", "actor 1")
        ]
        dead, other, successor = producers
        try:
            held = [await lease_all(dead, 2), await lease_all(other, 4)]
            assert await asyncio.to_thread(store.expire_leases, server, origin.run_id, "actor 1") == 2
            return [*held, await lease_all(successor, 4)]
        finally:
            for producer in producers:
                await producer.close()

    assert asyncio.run(main()) == [[0, 1], [2, 3], [0, 1]]


def test_owners_of_leases_are_kept_for_ever(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        for n in range(100):
            await producer.admit(n + 1, wanted=1)
            await add(producer, origin, n)

    produce(server, origin, body)
    with connect(server) as client:
        assert client.hlen(Keys.of(origin.run_id).owners) <= 70


def test_group_of_a_lost_lease_starts_again_under_too_old_a_version(server: Address, origin: Origin) -> None:
    """Two groups a step, max_lag 0: group 2 may start under version 1, and a lease on it that ran out no sooner."""

    async def body(producer: Producer) -> tuple[list[Lease], Closed | None]:
        await producer.admit(4, wanted=3)
        await add(producer, origin, 0)
        await add(producer, origin, 1)
        expire_leases(server, origin)
        assert await producer.admit(2, wanted=9) == ([], Closed.LAG_BUDGET)
        return await producer.admit(4, wanted=1)

    assert produce(server, origin, body) == ([Lease(2, 2)], None)


def test_late_group_of_a_lost_lease_is_kept_beside_the_new_one(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await producer.admit(1, wanted=1)
        expire_leases(server, origin)
        await producer.admit(1, wanted=1)
        return [await add(producer, origin, 0), await add(producer, origin, 0)]

    assert produce(server, origin, body) == [True, False]
    assert read_ledger(server, origin.run_id).closes


def test_prompt_that_always_fails_wedges_a_step(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await lease_all(producer, 2)
        retried = [await producer.fail(Lease(0, 1), 5)]
        assert (await producer.admit(2, wanted=9))[0] == [Lease(0, 2)]
        retried.append(await producer.fail(Lease(0, 2), 5))
        # The dropped group makes room for another one.
        assert await lease_all(producer, 2) == [2]
        await add(producer, origin, 2)
        await add(producer, origin, 1)
        return retried

    assert produce(server, origin, body) == [True, False]
    consumer = Consumer(server, origin)
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
        assert await producer.admit(99, wanted=1) == ([], Closed.FULL)
        return leases, await lease_all(producer, 99)

    three = Capacity(groups=3, bytes=1 << 30, groups_per_step=1)
    assert produce(server, origin, body, capacity=three) == ([0, 1, 2], [])
    consumer = Consumer(server, origin)
    consumer.commit(consumer.take(1, timeout_s=5), version=1)
    assert produce(server, origin, lambda p: lease_all(p, 99), capacity=three) == [3]


def test_ledger_loses_a_group_on_its_way(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2, 3])
    consumer = Consumer(server, origin)
    consumer.commit(consumer.take(3, timeout_s=5), version=1)
    produce(server, origin, lambda p: lease_all(p, 6))
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.generated, ledger.trained, ledger.buffered, ledger.in_flight) == (6, 3, 1, 2)
    assert (ledger.tokens_generated, ledger.tokens_trained, ledger.tokens_buffered) == (24, 18, 6)
    assert ledger.closes


def test_learner_killed_before_its_commit_loses_or_repeats_groups(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2, 3])
    first = Consumer(server, origin)
    first.commit(first.take(2, timeout_s=5), version=1)
    first.take(2, timeout_s=5)
    # The process dies here, with two groups read and not committed.
    second = Consumer(server, origin)
    assert second.version == 1
    entries = second.take(2, timeout_s=5)
    assert [e.group.admission for e in entries] == [2, 3]
    second.commit(entries, version=2)
    assert read_ledger(server, origin.run_id).trained == 4


def test_step_is_committed_twice(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    consumer = Consumer(server, origin)
    entries = consumer.take(2, timeout_s=5)
    consumer.commit(entries, version=1)
    with pytest.raises(BufferUnavailable, match="were not taken, or trained before"):
        consumer.commit(entries, version=2)
    with pytest.raises(BufferUnavailable, match="version 3 does not follow version 1"):
        consumer.commit(entries, version=3)
    assert read_ledger(server, origin.run_id).trained == 2


def test_commit_whose_reply_was_lost_fails_when_repeated(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2])
    consumer = Consumer(server, origin)
    entries = consumer.take(2, timeout_s=5)
    consumer.commit(entries, version=1)
    before = read_ledger(server, origin.run_id)
    consumer._commit_step(1, [(0, 6), (1, 6)], recovering=False)
    assert read_ledger(server, origin.run_id) == before


def test_group_whose_reply_was_lost_is_counted_twice(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await lease_all(producer, 2)
        kept = []
        for said in ("first", "again", "another's", "again"):
            if said == "again":
                say_again(producer)
            kept.append(await add(producer, origin, 0))
        return kept

    assert produce(server, origin, body) == [True, True, False, False]
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.generated, ledger.buffered, ledger.in_flight, ledger.dropped) == (3, 1, 1, {"duplicate": 1})
    assert (ledger.tokens_generated, ledger.tokens_buffered, ledger.tokens_dropped) == (12, 6, {"duplicate": 6})
    assert ledger.closes


def test_memory_of_added_groups_grows_with_the_run(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    produce(server, origin, lambda p: add(p, origin, 1))
    consumer = Consumer(server, origin)
    consumer.commit(consumer.take(2, timeout_s=5), version=1)
    assert produce(server, origin, lambda p: add(p, origin, 0)) is False
    client = connect(server)
    k = Keys.of(origin.run_id)
    assert not client.exists(k.buffered, k.uses, k.attempts, k.leases)
    assert client.xlen(k.stream) == 0
    client.close()


def test_remembered_answers_grow_with_the_run(server: Address, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterflow.buffer.producer.REMEMBERED_ANSWERS", 5)
    fill(server, origin, list(range(20)))
    with connect(server) as client:
        assert client.zcard(Keys.of(origin.run_id).answered) == 5


def test_dropped_group_is_waited_for_while_others_keep_arriving(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 9)
        await producer.fail(Lease(0, 1), 5)
        await producer.admit(9, wanted=1)
        await producer.fail(Lease(0, 2), 5)
        for n in range(1, 9):
            await add(producer, origin, n)

    produce(server, origin, body)
    consumer = Consumer(server, origin)
    assert [e.group.admission for e in consumer.take(2, timeout_s=5)] == [1, 2]
    assert len(consumer._shelf._entries) <= 4, "the learner read on past the groups of its next batch"


def test_finished_run_stays_on_the_server(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    Consumer(server, origin).close()
    neighbour = f"{origin.run_id}-2"
    client = connect(server)
    client.hset(Keys.of(neighbour).state, "version", 1)
    forget(server, origin.run_id)
    forget(server, origin.run_id)
    assert list(client.scan_iter(f"*{{{origin.run_id}}}*")) == []
    assert client.exists(Keys.of(neighbour).state)
    client.close()


def test_client_errors_escape_when_the_server_goes_away(tmp_path: Path, origin: Origin) -> None:
    with EmbeddedServer(tmp_path / "buffer", timeout_s=20) as server:
        address = Address(server.address.url, timeout_s=20, outage_s=0.2)
        fill(address, origin, [0, 1])
        consumer = Consumer(address, origin)
        entries = consumer.take(1, timeout_s=5)
    calls: dict[str, Callable[[], object]] = {
        "the state of the run": lambda: consumer.take(1, timeout_s=5),
        "the state of the run ": lambda: consumer.commit(entries, version=1),
        "the state of the run  ": lambda: Consumer(address, origin),
        "the reading of the ledger": lambda: read_ledger(address, origin.run_id),
        f"the removal of run {origin.run_id}": lambda: forget(address, origin.run_id),
        "the admission of groups": lambda: produce(address, origin, lambda p: p.admit(9, 1)),
        "the question for its largest value": lambda: produce(address, origin, lambda p: p.add(make_group(3), b"")),
        "the return of group 3": lambda: produce(address, origin, lambda p: p.fail(Lease(3, 1), 6)),
        "the end of run": lambda: finish(address, origin.run_id),
    }
    for what, call in calls.items():
        with pytest.raises(BufferUnavailable) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(f"the buffer at {address.shown} went away during {what.strip()}"), message
        assert "see whether its server still runs" in message and "\n" not in message


def test_client_errors_escape_when_the_server_refuses(server: Address, origin: Origin) -> None:
    client = connect(server)
    client.set(Keys.of(origin.run_id).state, "not a hash")
    client.close()
    with pytest.raises(BufferUnavailable, match=r"refused the admission of groups \(.*WRONGTYPE.*see the server's log"):
        produce(server, origin, lambda p: p.admit(9, 1))
    with pytest.raises(BufferUnavailable, match="refused the reading of the ledger"):
        read_ledger(server, origin.run_id)


def test_foreign_entry_stops_the_run(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 2)
        await producer.add(make_group(0), b"not arrow")
        await add(producer, origin, 1)
        assert await lease_all(producer, 2) == []

    produce(server, origin, body)
    consumer = Consumer(server, origin)
    assert [e.group.admission for e in consumer.take(1, timeout_s=5)] == [1]
    ledger = read_ledger(server, origin.run_id)
    assert ledger.dropped == {"poison": 1} and ledger.closes
    client = connect(server)
    ((_, quarantined),) = client.xrange(Keys.of(origin.run_id).quarantine)
    client.close()
    assert b"not an Arrow group" in quarantined[b"reason"] and quarantined[b"payload"] == b"not arrow"


@pytest.mark.parametrize("number", [b"\xb2", b"9" * 5000, b"-1", b""])
def test_foreign_number_crashes_the_reader(server: Address, origin: Origin, number: bytes) -> None:
    fill(server, origin, [0])
    client = connect(server)
    client.xadd(Keys.of(origin.run_id).stream, {"n": number, "tokens": b"6", "payload": b"not arrow"})
    client.close()
    consumer = Consumer(server, origin)
    with pytest.raises(DeadlineExceeded):
        consumer.take(2, timeout_s=0.3)
    assert read_ledger(server, origin.run_id).buffered == 1
    assert read_ledger(server, origin.run_id).strangers == 1


def test_learner_waits_for_ever(server: Address, origin: Origin) -> None:
    consumer = Consumer(server, origin)
    start = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match="the learner waited 0.3 s for 1 of 1 groups: the first of them is number 0"
    ):
        consumer.take(1, timeout_s=0.3)
    assert time.monotonic() - start >= 0.3
