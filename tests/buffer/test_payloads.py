"""Payloads lie under keys of their own: one is there as long as its group is buffered, whatever dies or is late."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from groups import make_group
from killing import kill_server
from produce import ROOMY, add, expire_leases, fill, lease_all, produce, say_again

from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Lease, Producer
from counterflow.buffer.reading import Reading
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import Keys, finish, forget, read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.errors import BufferUnavailable


def payloads(address: Address, origin: Origin) -> set[int]:
    """Groups with a payload on the server: those of the directory."""
    with connect(address) as client:
        k = Keys.of(origin.run_id)
        found = {int(key.rpartition(b":")[2]) for key in client.scan_iter(f"{k.payloads}*")}
        assert found == {int(n) for n in client.hkeys(k.buffered)}
        return found


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "buffer", timeout_s=60) as server:
        yield server


def test_payload_outlives_its_group_or_goes_before_it(server: Address, origin: Origin) -> None:
    fill(server, origin, [2, 0, 1, 3])
    assert payloads(server, origin) == {0, 1, 2, 3}
    consumer = Consumer(server, origin, reading=Reading(uses=2))
    consumer.commit(consumer.take(2, timeout_s=5), version=1)
    assert payloads(server, origin) == {0, 1, 2, 3}, "they are to be trained once more"
    consumer.commit(consumer.take(2, timeout_s=5), version=2)
    assert payloads(server, origin) == {2, 3}
    consumer._shelf.drop(2, consumer._standing().buffered[2], "stale")
    assert payloads(server, origin) == {3}
    finish(server, origin.run_id)
    assert payloads(server, origin) == set()


def test_quarantined_group_leaves_its_payload(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 2)
        await producer.add(make_group(0), b"not arrow")
        await add(producer, origin, 1)

    produce(server, origin, body)
    Consumer(server, origin).take(1, timeout_s=5)
    assert payloads(server, origin) == {1}


def test_duplicate_replaces_the_payload_that_was_kept(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await producer.admit(1, wanted=1)
        expire_leases(server, origin)
        await producer.admit(1, wanted=1)
        # Together, and again by itself.
        kept = await asyncio.gather(*(add(producer, origin, 0, tokens=tokens) for tokens in (5, 6)))
        return [*kept, await add(producer, origin, 0, tokens=7)]

    assert produce(server, origin, body) == [True, False, False]
    (entry,) = Consumer(server, origin).take(1, timeout_s=5)
    assert entry.group.response_tokens == 10
    assert payloads(server, origin) == {0}


def test_late_or_repeated_addition_leaves_a_payload(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await lease_all(producer, 3)
        await add(producer, origin, 0)
        consumer = Consumer(server, origin)
        consumer.commit(consumer.take(1, timeout_s=5), version=1)
        say_again(producer)
        again = await add(producer, origin, 0)
        late = await add(producer, origin, 0)
        # Nobody's any more: both attempts failed.
        await producer.fail(Lease(1, 1), 5)
        await producer.admit(3, wanted=1)
        await producer.fail(Lease(1, 2), 5)
        poison = await add(producer, origin, 1)
        # As the second of a batch whose first is kept.
        return [again, late, poison, *await asyncio.gather(add(producer, origin, 2), add(producer, origin, 1))]

    assert produce(server, origin, body) == [True, False, False, True, False]
    assert payloads(server, origin) == {2}
    assert read_ledger(server, origin.run_id).closes


def test_addition_after_the_end_leaves_a_payload(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 2)
        await add(producer, origin, 0)
        finish(server, origin.run_id)
        assert await add(producer, origin, 1) is False

    produce(server, origin, body)
    assert payloads(server, origin) == set()


def test_group_added_while_the_run_is_removed_leaves_a_payload(
    server: Address, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(server, origin, [0])
    hkeys = redis.Redis.hkeys

    def and_then_one_more(client: redis.Redis, key: str) -> object:
        found = hkeys(client, key)
        monkeypatch.setattr(redis.Redis, "hkeys", hkeys)
        produce(server, origin, one_more)
        return found

    async def one_more(producer: Producer) -> None:
        await lease_all(producer, 2)
        await add(producer, origin, 1)

    monkeypatch.setattr(redis.Redis, "hkeys", and_then_one_more)
    forget(server, origin.run_id)
    assert payloads(server, origin) == set()


def test_refused_addition_leaves_its_payload(own_server: EmbeddedServer, origin: Origin) -> None:
    address = Address(own_server.address.url, outage_s=0.3)

    async def body(producer: Producer) -> None:
        await lease_all(producer, 1)
        client.config_set("maxmemory", 1)
        with pytest.raises(BufferUnavailable, match=r"refused the addition of group 0 \(command not allowed.*memory"):
            await add(producer, origin, 0)
        client.config_set("maxmemory", 0)
        assert payloads(address, origin) == set()
        client.set(Keys.of(origin.run_id).attempts, "not a hash")
        with pytest.raises(BufferUnavailable, match=r"refused the addition of group 0 \(WRONGTYPE"):
            await add(producer, origin, 0)

    with connect(address) as client:
        produce(address, origin, body)
        assert list(client.scan_iter(f"{Keys.of(origin.run_id).payloads}*")) == []


def test_producer_killed_in_the_middle_of_an_addition_leaves_a_payload(
    own_server: EmbeddedServer, origin: Origin
) -> None:
    """It sends so much of its transaction and dies."""
    whole = b""

    async def body(producer: Producer) -> None:
        await lease_all(producer, 1)
        await producer._check_size(0, 0)

        async def send(self: object, command: object, check_health: bool = True) -> None:
            nonlocal whole
            whole = command if isinstance(command, bytes) else b"".join(command)  # type: ignore[arg-type]
            raise redis.exceptions.DataError("recorded")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(producer._client.connection_pool.connection_class, "send_packed_command", send)
            with pytest.raises(BufferUnavailable, match="recorded"):
                await add(producer, origin, 0)

    produce(own_server.address, origin, body)
    assert whole.startswith(b"*1\r\n$5\r\nMULTI") and whole.endswith(b"EXEC\r\n")
    path = own_server.address.url.removeprefix("unix://")
    for end in range(0, len(whole), 97):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(whole[:end])
    assert payloads(own_server.address, origin) == set()
    ledger = read_ledger(own_server.address, origin.run_id)
    assert (ledger.in_flight, ledger.generated) == (1, 1) and ledger.closes
    assert produce(own_server.address, origin, lambda p: add(p, origin, 0)) is True
    assert payloads(own_server.address, origin) == {0}


@pytest.mark.parametrize("change", ["addition", "commit"])
def test_server_killed_in_the_middle_of_a_write_parts_group_and_payload(
    own_server: EmbeddedServer, tmp_path: Path, origin: Origin, change: str
) -> None:
    """Its log ends somewhere in the change; a cut is made by ever less, on the same data."""
    address = own_server.address
    (log,) = (tmp_path / "buffer").rglob("*.incr.aof")
    produce(address, origin, lambda p: lease_all(p, 2))
    before = log.stat().st_size
    consumer = Consumer(address, origin)
    if change == "addition":
        produce(address, origin, lambda p: add(p, origin, 0))
    else:
        produce(address, origin, lambda p: add(p, origin, 0))
        produce(address, origin, lambda p: add(p, origin, 1))
        before = log.stat().st_size
        consumer.commit(consumer.take(2, timeout_s=5), version=1)
    consumer.close()
    whole = log.read_bytes()
    for cut in range(1, 8):
        kill_server(address)
        log.write_bytes(whole)
        os.truncate(log, before + (len(whole) - before) * cut // 8)
        assert own_server.revive()
        there = payloads(address, origin)
        ledger = read_ledger(address, origin.run_id)
        assert ledger.buffered == len(there) and ledger.closes
        assert there in ((set(), {0}) if change == "addition" else (set(), {0, 1}))


def test_producers_of_long_ago_are_remembered_for_ever(server: Address, origin: Origin) -> None:
    for _ in range(5):
        produce(server, origin, lambda p: p.admit(9, wanted=1), lease_s=0, capacity=ROOMY)
    produce(server, origin, lambda p: p.admit(9, wanted=1))
    produce(server, origin, lambda p: p.admit(9, wanted=1))
    with connect(server) as client:
        assert client.hlen(Keys.of(origin.run_id).producers) == 2


def test_payload_is_given_the_wrong_size(server: Address, origin: Origin) -> None:
    fill(server, origin, [0])
    assert read_ledger(server, origin.run_id).bytes_buffered == len(encode(make_group(0), origin.schema()))
