"""The server dies, forgets, or is full, while producers and the learner live: nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from groups import make_group
from produce import add, fill, lease_all, produce

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Lease, Producer
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.errors import BufferUnavailable, UnavailableError


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "buffer", timeout_s=10) as server:
        yield server


@pytest.fixture
def archive(tmp_path: Path, origin: Origin) -> Iterator[Archive]:
    archive = Archive(tmp_path / "archive", origin)
    yield archive
    archive.close()


def kill(address: Address) -> None:
    with connect(address) as client:
        process = psutil.Process(int(client.info("server")["process_id"]))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


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
    kill(own_server.address)
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
        kill(address)
        threading.Timer(0.3, own_server.revive).start()
        return await add(producer, origin, 0)

    assert produce(address, origin, body) is True
    assert read_ledger(address, origin.run_id).closes


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
    kill(address)
    os.truncate(log, start + int(kept * (log.stat().st_size - start)))
    assert own_server.revive()

    consumer.commit(held, version=3)

    async def regenerate(producer: Producer) -> None:
        while (ledger := read_ledger(address, origin.run_id)).trained + ledger.buffered < 8:
            leases, _ = await producer.admit(8, wanted=8)
            for lease in leases:
                await add(producer, origin, lease.admission, lease.attempt)
            await asyncio.sleep(0.02)

    generating = threading.Thread(target=produce, args=(address, origin, regenerate))
    generating.start()
    consumer.commit(consumer.take(2, timeout_s=20), version=4)
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
    kill(address)
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
    kill(own_server.address)
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
        threading.Timer(0.5, client.config_set, ("maxmemory", 0)).start()
        group = make_group(2)
        start = time.monotonic()
        kept = await producer.add(Lease(2, 1), group.response_tokens, encode(group, origin.schema()))
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
        with connect(address) as client:
            while not done.is_set():
                client.client_kill_filter(_type="normal", skipme=True)
                time.sleep(moments.uniform(0, longest_s))

    cutting = threading.Thread(target=cut)
    count = 40 if call == "add" else 200
    consumer = Consumer(address, origin, archive)
    if call == "commit":
        fill(address, origin, list(range(count)))
    cutting.start()
    try:
        if call == "add":
            fill(address, origin, list(range(count)))
        else:
            for version in range(1, count // 2 + 1):
                consumer.commit(consumer.take(2, timeout_s=10), version)
    finally:
        done.set()
        cutting.join()
    ledger = read_ledger(address, origin.run_id)
    assert ledger.generated == count and ledger.dropped == {} and ledger.closes
    assert (ledger.buffered, ledger.trained) == ((count, 0) if call == "add" else (0, count))


def test_second_learner_writes_into_the_archive_of_the_first(
    own_server: EmbeddedServer, origin: Origin, archive: Archive
) -> None:
    Consumer(own_server.address, origin, archive)
    with pytest.raises(UnavailableError, match="archive"):
        Archive(archive.folder, origin)
