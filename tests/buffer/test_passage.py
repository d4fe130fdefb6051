"""A group's way through the buffer: the learner's versions at its addition and at its first take, on a real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from groups import make_group
from killing import kill_server
from produce import add, fill, lease_all, produce

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import to_batch
from counterflow.buffer.connection import Address
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Producer
from counterflow.buffer.reading import Reading
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Origin, Passage
from counterflow.weight_sync.lag import group_lags

Way = tuple[int, int, int]


def ways(entries: list[Entry]) -> list[Way]:
    """Number, version at the addition, version at the first take."""
    return [(entry.group.admission, entry.added_at, entry.taken_at) for entry in entries]


def archived(folder: Path) -> list[list[Way]]:
    return [
        [(b.column("admission")[0].as_py(), p.added_at, p.taken_at) for b, p in zip(s.groups, s.passages, strict=True)]
        for s in read_steps(folder)
    ]


def lease(server: Address, origin: Origin, open_groups: int) -> list[int]:
    return produce(server, origin, lambda producer: lease_all(producer, open_groups))


def deliver(server: Address, origin: Origin, *numbers: int, version: int = 0) -> None:
    """Add groups that are leased already, sampled by this version."""

    async def body(producer: Producer) -> None:
        for n in numbers:
            assert await add(producer, origin, n, version=version)

    produce(server, origin, body)


def train(consumer: Consumer, groups: int) -> list[Way]:
    """One step, and its groups' ways."""
    entries = consumer.take(groups, timeout_s=5)
    consumer.commit(entries, consumer.version + 1)
    return ways(entries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def test_group_counts_as_added_or_taken_at_another_version(server: Address, origin: Origin, folder: Path) -> None:
    lease(server, origin, 6)
    with closing(Consumer(server, origin, Archive(folder, origin))) as consumer:
        deliver(server, origin, 0, 3)
        assert train(consumer, 1) == [(0, 0, 0)]
        deliver(server, origin, 1, 5, version=1)
        assert train(consumer, 1) == [(1, 1, 1)]
        deliver(server, origin, 4, 2, version=1)
        assert train(consumer, 2) == [(2, 2, 2), (3, 0, 2)]
        # Fetched ahead at version 2, taken at 3.
        assert train(consumer, 2) == [(4, 2, 3), (5, 1, 3)]
    assert archived(folder) == [[(0, 0, 0)], [(1, 1, 1)], [(2, 2, 2), (3, 0, 2)], [(4, 2, 3), (5, 1, 3)]]


def test_second_use_counts_as_the_first_take(server: Address, origin: Origin, folder: Path) -> None:
    lease(server, origin, 3)
    deliver(server, origin, 0)
    with closing(Consumer(server, origin, Archive(folder, origin), Reading(uses=2))) as consumer:
        assert train(consumer, 1) == [(0, 0, 0)]
        deliver(server, origin, 1, 2, version=1)
        assert train(consumer, 1) == [(0, 0, 0)]
        assert train(consumer, 2) == [(1, 1, 2), (2, 1, 2)]
        assert train(consumer, 2) == [(1, 1, 2), (2, 1, 2)]
    assert archived(folder)[2:] == [[(1, 1, 2), (2, 1, 2)]] * 2


def test_group_left_behind_counts_as_taken(server: Address, origin: Origin) -> None:
    """It was fetched, and then the batch was made of fresher ones."""
    lease(server, origin, 3)
    deliver(server, origin, 0, 1)
    consumer = Consumer(server, origin, reading=Reading(order="freshest"))
    assert train(consumer, 1) == [(0, 0, 0)]
    deliver(server, origin, 2, version=1)
    assert train(consumer, 1) == [(2, 1, 1)]
    assert train(consumer, 1) == [(1, 0, 2)]


def test_learner_that_comes_back_loses_when_a_group_was_added(server: Address, origin: Origin, folder: Path) -> None:
    lease(server, origin, 3)
    deliver(server, origin, 0, 1)
    with closing(Consumer(server, origin, Archive(folder, origin), Reading(uses=2))) as consumer:
        assert train(consumer, 2) == [(0, 0, 0), (1, 0, 0)]
        deliver(server, origin, 2, version=1)
        consumer.take(2, timeout_s=5)
    with closing(Consumer(server, origin, Archive(folder, origin), Reading(uses=2))) as consumer:
        # This learner has not taken them before.
        assert train(consumer, 2) == [(0, 0, 1), (1, 0, 1)]
        assert train(consumer, 1) == [(2, 1, 2)]
    assert archived(folder) == [[(0, 0, 0), (1, 0, 0)], [(0, 0, 1), (1, 0, 1)], [(2, 1, 2)]]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "buffer", timeout_s=60) as server:
        yield server


def log_of(tmp_path: Path) -> Path:
    (log,) = (tmp_path / "buffer").rglob("*.incr.aof")
    return log


def test_server_that_forgot_its_version_makes_a_negative_part(
    own_server: EmbeddedServer, origin: Origin, folder: Path, tmp_path: Path
) -> None:
    address = own_server.address
    lease(address, origin, 5)
    deliver(address, origin, 0, 1)
    with closing(Consumer(address, origin, Archive(folder, origin))) as consumer:
        size = log_of(tmp_path).stat().st_size
        assert train(consumer, 1) == [(0, 0, 0)]
        assert train(consumer, 1) == [(1, 0, 1)]
        kill_server(address)
        os.truncate(log_of(tmp_path), size)
        assert own_server.revive()
        # The server is at version 0 again until the learner asks; then it knows better.
        deliver(address, origin, 2, version=2)
        consumer._check_standing()
        deliver(address, origin, 3, version=2)
        entries = consumer.take(1, timeout_s=5)
        assert ways(entries) == [(2, 0, 2)]
        spans = [t.version_spans for t in entries[0].group.trajectories]
        lags = group_lags(spans, entries[0].passage, consumer.version, recomputed=True)
        parts = (lags.total, lags.in_flight, lags.in_queue, lags.in_learner)
        assert [part.tolist() for part in parts] == [[0] * 6] * 4
        consumer.commit(entries, version=3)
        assert train(consumer, 1) == [(3, 2, 3)]


def test_group_lost_between_two_uses_and_made_again_keeps_its_first_take(
    own_server: EmbeddedServer, origin: Origin, folder: Path, tmp_path: Path
) -> None:
    address = own_server.address
    assert lease(address, origin, 1) == [0]
    with closing(Consumer(address, origin, Archive(folder, origin), Reading(uses=2))) as consumer:
        size = log_of(tmp_path).stat().st_size
        deliver(address, origin, 0)
        assert train(consumer, 1) == [(0, 0, 0)]
        kill_server(address)
        os.truncate(log_of(tmp_path), size)
        assert own_server.revive()
        consumer._check_standing()
        deliver(address, origin, 0, version=1)
        # Other tokens: the learner takes them for the first time.
        assert train(consumer, 1) == [(0, 1, 1)]


def test_ways_change_in_the_archive_or_are_made_up(folder: Path, origin: Origin) -> None:
    batches = [to_batch(make_group(n), origin.schema()) for n in range(300)]
    passages = [Passage(n, 10**12 + n) for n in range(300)]
    with closing(Archive(folder, origin)) as archive:
        archive.append(0, batches, passages)
        archive.append(1, batches)
    told, untold = read_steps(folder)
    assert told.passages == passages and untold.passages == []
    assert told.groups == untold.groups == batches
    with closing(Archive(folder, origin)) as archive:
        assert archive.last_version == 1


def test_said_again_addition_moves_to_a_later_version(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    consumer = Consumer(server, origin)
    assert train(consumer, 1) == [(0, 0, 0)]

    async def again(producer: Producer) -> bool:
        return await add(producer, origin, 1)

    assert produce(server, origin, again) is False
    assert train(consumer, 1) == [(1, 0, 1)]
