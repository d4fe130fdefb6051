"""The server dies, forgets, or is full, while producers and the learner live: nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from groups import make_group
from killing import kill_server
from produce import ROOMY, add, fill, lease_all, produce

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Lease, Producer
from counterflow.buffer.reading import Reading
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.errors import BufferUnavailable, DeadlineExceeded


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "buffer", timeout_s=60) as server:
        yield server


@pytest.fixture
def archive(tmp_path: Path, origin: Origin) -> Iterator[Archive]:
    archive = Archive(tmp_path / "archive", origin)
    yield archive
    archive.close()


def log_of(server_folder: Path) -> Path:
    (log,) = server_folder.rglob("*.incr.aof")
    return log


def trained(folder: Path) -> list[int]:
    return [batch.column("admission")[0].as_py() for step in read_steps(folder) for batch in step.groups]


def test_server_killed_between_take_and_commit_loses_the_step(
    own_server: EmbeddedServer, origin: Origin, archive: Archive
) -> None:
    fill(own_server.address, origin, [0, 1, 2, 3])
    consumer = Consumer(own_server.address, origin, archive)
    entries = consumer.take(2, timeout_s=5)
    kill_server(own_server.address)
    threading.Timer(0.3, own_server.revive).start()
    consumer.commit(entries, version=1)
    consumer.commit(consumer.take(2, timeout_s=5), version=2)
    ledger = consumer.ledger()
    assert (ledger.trained, ledger.buffered, ledger.regenerated) == (4, 0, 0) and ledger.closes
    assert trained(archive.folder) == [0, 1, 2, 3]


def test_producer_gives_up_while_the_server_starts_again(own_server: EmbeddedServer, origin: Origin) -> None:
    address = own_server.address

    async def body(producer: Producer) -> bool:
        await lease_all(producer, 1)
        kill_server(address)
        threading.Timer(0.3, own_server.revive).start()
        return await add(producer, origin, 0)

    assert produce(address, origin, body) is True
    assert read_ledger(address, origin.run_id).closes


class PowerCut:
    """The server dies and its log keeps what it held at `mark`."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.mark()

    def mark(self) -> None:
        self.size = log_of(self.folder).stat().st_size

    def strike(self) -> None:
        log = log_of(self.folder)
        kill_server(self.server.address)
        os.truncate(log, self.size)
        assert self.server.revive()


@pytest.fixture
def power_cut(own_server: EmbeddedServer, tmp_path: Path) -> PowerCut:
    return PowerCut(own_server, tmp_path / "buffer")


def test_forgotten_lease_swallows_the_group_of_its_next_holder(
    own_server: EmbeddedServer, origin: Origin, power_cut: PowerCut
) -> None:
    address = own_server.address

    async def body(older: Producer) -> list[bool]:
        async def newer(producer: Producer) -> bool:
            # The server hands number 0 out anew, as attempt 1, and the older holder comes first.
            assert await lease_all(producer, 1) == [0]
            kept = await add(older, origin, 0)
            assert kept is True
            return await add(producer, origin, 0)

        await lease_all(older, 1)
        power_cut.strike()
        producer = Producer(address, origin.run_id, capacity=ROOMY, lease_s=60, attempts=1)
        late = await newer(producer)
        await producer.close()
        return [late]

    assert produce(address, origin, body) == [False]
    ledger = read_ledger(address, origin.run_id)
    assert (ledger.buffered, ledger.in_flight, ledger.dropped) == (1, 0, {"duplicate": 1}) and ledger.closes


def test_power_cut_between_two_uses_kills_the_learner(
    own_server: EmbeddedServer, origin: Origin, archive: Archive, power_cut: PowerCut
) -> None:
    address = own_server.address
    consumer = Consumer(address, origin, archive, Reading(uses=2))
    power_cut.mark()
    fill(address, origin, [0, 1])
    consumer.commit(consumer.take(2, timeout_s=5), version=1)
    held = consumer.take(2, timeout_s=5)
    power_cut.strike()
    consumer.commit(held, version=2)
    ledger = consumer.ledger()
    assert (ledger.trained, ledger.buffered, ledger.in_flight, ledger.policy_version) == (2, 0, 0, 2) and ledger.closes
    assert trained(archive.folder) == [0, 1, 0, 1]


def test_lost_group_that_was_held_and_made_again_spoils_the_ledger(
    own_server: EmbeddedServer, origin: Origin, archive: Archive, power_cut: PowerCut
) -> None:
    address = own_server.address
    consumer = Consumer(address, origin, archive)
    power_cut.mark()
    fill(address, origin, [0, 1])
    held = consumer.take(2, timeout_s=5)
    power_cut.strike()

    async def longer(producer: Producer) -> None:
        for n in await lease_all(producer, 2):
            await add(producer, origin, n, tokens=9)

    produce(address, origin, longer)
    consumer.commit(held, version=1)
    ledger = consumer.ledger()
    assert (ledger.trained, ledger.tokens_trained, ledger.dropped) == (2, 12, {"duplicate": 2})
    assert ledger.tokens_dropped == {"duplicate": 36} and ledger.closes


def test_learner_with_a_predecessor_is_superseded_by_nobody(
    own_server: EmbeddedServer, origin: Origin, tmp_path: Path, power_cut: PowerCut
) -> None:
    Consumer(own_server.address, origin, Archive(tmp_path / "archive", origin)).close()
    consumer = Consumer(own_server.address, origin, Archive(tmp_path / "archive", origin))
    power_cut.strike()
    fill(own_server.address, origin, [0])
    consumer.commit(consumer.take(1, timeout_s=5), version=1)
    consumer.close()


def test_learner_takes_back_a_run_that_was_taken_from_it(
    own_server: EmbeddedServer, origin: Origin, power_cut: PowerCut
) -> None:
    older = Consumer(own_server.address, origin)
    power_cut.strike()
    Consumer(own_server.address, origin)
    with pytest.raises(BufferUnavailable, match="another learner has taken over"):
        older.take(1, timeout_s=0)


def test_group_seen_and_lost_waits_for_its_lease(
    own_server: EmbeddedServer, origin: Origin, archive: Archive, power_cut: PowerCut
) -> None:
    address = own_server.address
    produce(address, origin, lambda p: lease_all(p, 3))
    power_cut.mark()
    consumer = Consumer(address, origin, archive)

    async def add_all(producer: Producer) -> None:
        for n in range(3):
            await add(producer, origin, n)

    produce(address, origin, add_all)
    consumer.take(1, timeout_s=5)
    power_cut.strike()
    with pytest.raises(DeadlineExceeded):
        consumer.take(1, timeout_s=0)
    # At once, and not as a second attempt; group 0 too, though the learner holds it.
    leases, _ = produce(address, origin, lambda p: p.admit(3, wanted=9))
    assert leases == [Lease(n, 1) for n in range(3)]
    assert consumer.ledger().regenerated == 2


def test_full_server_keeps_the_learner_out(own_server: EmbeddedServer, origin: Origin) -> None:
    """It is the learner that frees memory."""
    address = own_server.address
    fill(address, origin, [0, 1])
    with connect(address) as client:
        client.config_set("maxmemory", 1)
        consumer = Consumer(address, origin)
        consumer.commit(consumer.take(2, timeout_s=5), version=1)
        client.config_set("maxmemory", 0)
    assert read_ledger(address, origin.run_id).trained == 2


def test_full_server_keeps_a_returning_learner_out(
    own_server: EmbeddedServer, origin: Origin, archive: Archive, power_cut: PowerCut
) -> None:
    address = own_server.address
    consumer = Consumer(address, origin, archive)
    fill(address, origin, [0, 1])
    consumer.take(1, timeout_s=5)
    power_cut.mark()
    held = consumer.take(1, timeout_s=5)
    power_cut.strike()
    with connect(address) as client:
        client.config_set("maxmemory", 1)
        consumer.commit(held, version=1)
        client.config_set("maxmemory", 0)
    assert read_ledger(address, origin.run_id).trained == 1


@pytest.mark.parametrize("kept", [0.999, 0.8, 0.5, 0.2, 0.0])
def test_power_cut_loses_groups_or_trains_them_twice(
    own_server: EmbeddedServer, origin: Origin, archive: Archive, tmp_path: Path, kept: float
) -> None:
    """The log's tail is cut off: what the archive holds is told anew, the rest is generated anew."""
    address = own_server.address
    consumer = Consumer(address, origin, archive)
    start = log_of(tmp_path / "buffer").stat().st_size
    fill(address, origin, list(range(8)))
    for version in (1, 2):
        consumer.commit(consumer.take(2, timeout_s=5), version)
    held = consumer.take(2, timeout_s=5)
    log = log_of(tmp_path / "buffer")
    kill_server(address)
    os.truncate(log, start + int(kept * (log.stat().st_size - start)))
    assert own_server.revive()

    consumer.commit(held, version=3)

    async def regenerate(producer: Producer) -> None:
        while (ledger := read_ledger(address, origin.run_id)).trained + ledger.buffered < 8:
            leases, _ = await producer.admit(8, wanted=8)
            for lease in leases:
                await add(producer, origin, lease.admission)
            await asyncio.sleep(0.02)

    generating = threading.Thread(target=produce, args=(address, origin, regenerate))
    generating.start()
    consumer.commit(consumer.take(2, timeout_s=300), version=4)
    generating.join()
    assert trained(archive.folder) == list(range(8))
    ledger = consumer.ledger()
    assert (ledger.trained, ledger.buffered, ledger.in_flight) == (8, 0, 0), ledger
    assert ledger.closes
    if kept == 0:
        assert ledger.regenerated == 2


def test_learner_and_server_both_die_and_the_log_is_cut(
    own_server: EmbeddedServer, origin: Origin, tmp_path: Path
) -> None:
    address, folder = own_server.address, tmp_path / "archive"
    first = Consumer(address, origin, Archive(folder, origin))
    log = log_of(tmp_path / "buffer")
    start = log.stat().st_size
    fill(address, origin, list(range(6)))
    for version in (1, 2):
        first.commit(first.take(2, timeout_s=5), version)
    first.close()
    kill_server(address)
    os.truncate(log, start)
    own_server.revive()
    second = Consumer(address, origin, Archive(folder, origin))
    assert second.version == 2
    ledger = second.ledger()
    assert (ledger.generated, ledger.trained, ledger.in_flight) == (4, 4, 0) and ledger.closes
    assert produce(address, origin, lambda p: lease_all(p, 6)) == [4, 5]
    second.close()


def test_server_that_forgot_everything_is_believed(own_server: EmbeddedServer, origin: Origin) -> None:
    fill(own_server.address, origin, [0, 1, 2])
    consumer = Consumer(own_server.address, origin)
    consumer.commit(consumer.take(1, timeout_s=5), version=1)
    with connect(own_server.address) as client:
        client.flushall()
    kill_server(own_server.address)
    own_server.revive()
    with pytest.raises(BufferUnavailable, match="is at version 0 of run .*, its archive at 1"):
        consumer.take(1, timeout_s=5)


def test_full_memory_loses_a_group_or_wedges_the_run(
    own_server: EmbeddedServer, origin: Origin, archive: Archive
) -> None:
    address = own_server.address
    client = connect(address)
    fill(address, origin, [0, 1])
    consumer = Consumer(address, origin, archive)

    async def body(producer: Producer) -> bool:
        await lease_all(producer, 3)
        client.config_set("maxmemory", 1)
        group = make_group(2)
        start = time.monotonic()
        threading.Timer(0.5, client.config_set, ("maxmemory", 0)).start()
        kept = await producer.add(group, encode(group, origin.schema()))
        assert time.monotonic() - start > 0.2
        return kept

    assert produce(address, origin, body) is True
    # The learner frees memory: it must be able to go on where producers cannot.
    client.config_set("maxmemory", 1)
    consumer.commit(consumer.take(3, timeout_s=5), version=1)
    client.config_set("maxmemory", 0)
    client.close()
    ledger = consumer.ledger()
    assert ledger.trained == 3 and ledger.closes


def test_full_memory_is_waited_for_without_end(own_server: EmbeddedServer, origin: Origin) -> None:
    with connect(own_server.address) as client:
        client.config_set("maxmemory", 1)
    address = Address(own_server.address.url, outage_s=0.3)
    with pytest.raises(BufferUnavailable, match=r"refused the admission of groups \(.*maxmemory.*; tried for .* s\)"):
        produce(address, origin, lambda p: p.admit(1, wanted=1))


@pytest.mark.parametrize(("call", "longest_s"), [("add", 0.006), ("commit", 0.3)])
def test_connection_reset_in_the_middle_of_a_call_counts_it_twice(
    own_server: EmbeddedServer, origin: Origin, archive: Archive, call: str, longest_s: float
) -> None:
    """Connections are cut again and again while calls are under way."""
    address, moments = own_server.address, random.Random(0)
    done = threading.Event()

    def cut() -> None:
        longest = longest_s
        with connect(address) as client:
            while not done.is_set():
                client.client_kill_filter(_type="normal", skipme=True)
                time.sleep(moments.uniform(0, longest))
                # However slow the machine is, a call gets through in the end.
                longest *= 1.02

    cutting = threading.Thread(target=cut)
    count = 40 if call == "add" else 100
    consumer = Consumer(address, origin, archive)
    if call == "commit":
        fill(address, origin, list(range(count)))
    cutting.start()
    try:
        if call == "add":
            fill(address, origin, list(range(count)))
        else:
            for version in range(1, count // 2 + 1):
                consumer.commit(consumer.take(2, timeout_s=60), version)
    finally:
        done.set()
        cutting.join()
    ledger = read_ledger(address, origin.run_id)
    assert ledger.generated == count and ledger.dropped == {} and ledger.closes
    assert (ledger.buffered, ledger.trained) == ((count, 0) if call == "add" else (0, count))
