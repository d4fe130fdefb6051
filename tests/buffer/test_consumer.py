"""Reading policies, second uses, two learners, and groups that must not be trained, on a real server."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from groups import make_group
from produce import add, fill, lease_all, produce, say_again

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import encode, to_batch
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Capacity, Closed, Lease, Producer
from counterflow.buffer.reading import Reading
from counterflow.buffer.shelf import Entry
from counterflow.buffer.store import Keys, finish, forget, read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.errors import BufferUnavailable, DeadlineExceeded, EntryError


def admissions(entries: list[Entry]) -> list[int]:
    return [entry.group.admission for entry in entries]


def at_version(server: Address, origin: Origin, version: int) -> None:
    client = connect(server)
    client.hset(Keys.of(origin.run_id).state, "version", version)
    client.close()


def fill_with_versions(server: Address, origin: Origin, versions: dict[int, int]) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, len(versions))
        for n, version in versions.items():
            await add(producer, origin, n, version=version)

    produce(server, origin, body)


def test_ready_groups_wait_for_a_slow_one(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 5)
        for n in (3, 1, 4, 2):
            await add(producer, origin, n)

    produce(server, origin, body)
    consumer = Consumer(server, origin, reading=Reading(order="ready"))
    first, second = consumer.take(2, timeout_s=5), consumer.take(2, timeout_s=5)
    assert (admissions(first), admissions(second)) == ([3, 1], [4, 2])
    with pytest.raises(DeadlineExceeded, match="1 of 1 groups: 1 are being generated"):
        consumer.take(1, timeout_s=0.3)


def test_freshest_groups_come_behind_older_ones(server: Address, origin: Origin) -> None:
    at_version(server, origin, 9)
    fill_with_versions(server, origin, {0: 5, 1: 7, 2: 6, 3: 7, 4: 9})
    consumer = Consumer(server, origin, reading=Reading(order="freshest"))
    assert admissions(consumer.take(3, timeout_s=5)) == [4, 1, 3]
    assert admissions(consumer.take(2, timeout_s=5)) == [2, 0]


@pytest.mark.parametrize("order", ["ready", "freshest"])
def test_group_past_the_lag_bound_is_trained(server: Address, origin: Origin, order: str) -> None:
    at_version(server, origin, 9)
    fill_with_versions(server, origin, {0: 5, 1: 7, 2: 4, 3: 9})
    consumer = Consumer(server, origin, reading=Reading(order=order, max_lag=4))  # type: ignore[arg-type]
    assert sorted(admissions(consumer.take(3, timeout_s=5))) == [0, 1, 3]
    ledger = read_ledger(server, origin.run_id)
    assert ledger.dropped == {"stale": 1} and ledger.tokens_dropped == {"stale": 6} and ledger.closes
    # Another group may start in its place.
    assert produce(server, origin, lambda p: lease_all(p, 4)) == [4]


async def add_without_signal(producer: Producer, origin: Origin, admission: int) -> None:
    group = make_group(admission)
    flat = dataclasses.replace(
        group, trajectories=tuple(dataclasses.replace(t, reward=1.0) for t in group.trajectories)
    )
    await producer.add(flat, encode(flat, origin.schema()))


def test_group_without_signal_is_trained_where_it_should_be_filtered(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 2)
        await add_without_signal(producer, origin, 0)
        await add(producer, origin, 1)

    produce(server, origin, body)
    consumer = Consumer(server, origin, reading=Reading(drop_equal_rewards=True))
    assert admissions(consumer.take(1, timeout_s=5)) == [1]
    ledger = read_ledger(server, origin.run_id)
    assert ledger.dropped == {"filtered": 1} and ledger.closes


def test_learner_waits_in_vain_for_signal_without_saying_what_was_dropped(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 1)
        await add_without_signal(producer, origin, 0)

    produce(server, origin, body)
    consumer = Consumer(server, origin, reading=Reading(drop_equal_rewards=True))
    with pytest.raises(DeadlineExceeded, match=r"1 were dropped, their rewards all equal \(buffer.drop_equal_rewards"):
        consumer.take(1, timeout_s=0.2)


def test_group_is_used_once_or_thrice_instead_of_twice(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2, 3])
    consumer = Consumer(server, origin, reading=Reading(uses=2))
    seen = []
    for version in range(1, 5):
        entries = consumer.take(2, timeout_s=5)
        seen.append(admissions(entries))
        consumer.commit(entries, version)
        assert read_ledger(server, origin.run_id).closes
    assert seen == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert read_ledger(server, origin.run_id).trained == 4


def test_learner_killed_between_two_uses_forgets_the_first(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    first = Consumer(server, origin, reading=Reading(uses=2))
    first.commit(first.take(2, timeout_s=5), version=1)
    second = Consumer(server, origin, reading=Reading(uses=2))
    second.commit(second.take(2, timeout_s=5), version=2)
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.trained, ledger.buffered) == (2, 0) and ledger.closes


def test_two_learners_train_the_same_group(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2, 3])
    older = Consumer(server, origin)
    held = older.take(2, timeout_s=5)
    newer = Consumer(server, origin)
    for use in (lambda: older.commit(held, version=1), lambda: older.take(1, timeout_s=5)):
        with pytest.raises(BufferUnavailable, match="another learner has taken over run .*: end this one"):
            use()
    for version in (1, 2):
        newer.commit(newer.take(2, timeout_s=5), version)
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.trained, ledger.buffered) == (4, 0) and ledger.closes


def test_superseded_learner_drops_groups(server: Address, origin: Origin) -> None:
    fill(server, origin, [0])
    older = Consumer(server, origin)
    older.take(1, timeout_s=5)
    Consumer(server, origin)
    with pytest.raises(BufferUnavailable, match="another learner has taken over"):
        older._shelf.drop(0, older._standing().buffered[0], "stale")
    assert read_ledger(server, origin.run_id).buffered == 1


def test_token_of_a_version_that_was_never_made_is_trained(server: Address, origin: Origin) -> None:
    fill_with_versions(server, origin, {0: 1, 1: 0})
    consumer = Consumer(server, origin)
    assert admissions(consumer.take(1, timeout_s=5)) == [1]
    client = connect(server)
    ((_, quarantined),) = client.xrange(Keys.of(origin.run_id).quarantine)
    client.close()
    assert quarantined[b"reason"] == b"a token of version 1, while the learner's is 0"
    assert read_ledger(server, origin.run_id).closes


def test_bytes_in_the_buffer_have_no_bound(server: Address, origin: Origin) -> None:
    size = len(encode(make_group(0), origin.schema()))
    capacity = Capacity(groups=99, bytes=3 * size + 1, groups_per_step=1)

    async def body(producer: Producer) -> None:
        # Nothing is known of their size yet.
        leases, _ = await producer.admit(99, wanted=2)
        for lease in leases:
            await add(producer, origin, lease.admission)
        # One more fits, counting what is in flight.
        assert await producer.admit(99, wanted=5) == ([Lease(2, 1)], Closed.FULL)
        await add(producer, origin, 2)
        assert await producer.admit(99, wanted=5) == ([], Closed.FULL)
        assert read_ledger(server, origin.run_id).bytes_buffered == 3 * size

    produce(server, origin, body, capacity=capacity)
    consumer = Consumer(server, origin)
    consumer.commit(consumer.take(2, timeout_s=5), version=1)
    assert read_ledger(server, origin.run_id).bytes_buffered == size
    assert produce(server, origin, lambda p: lease_all(p, 99), capacity=capacity) == [3, 4]


def test_buffer_too_small_for_one_step_wedges_it(server: Address, origin: Origin) -> None:
    capacity = Capacity(groups=99, bytes=1, groups_per_step=3)

    async def body(producer: Producer) -> list[int]:
        leased = []
        for _ in range(3):
            for lease in (await producer.admit(99, wanted=1))[0]:
                leased.append(lease.admission)
                await add(producer, origin, lease.admission)
        assert await producer.admit(99, wanted=1) == ([], Closed.FULL)
        return leased

    assert produce(server, origin, body, capacity=capacity) == [0, 1, 2]


def test_group_larger_than_the_server_accepts_kills_the_connection(server: Address, origin: Origin) -> None:
    client = connect(server)
    before = client.config_get("proto-max-bulk-len")
    client.config_set("proto-max-bulk-len", 1 << 20)

    async def body(producer: Producer) -> bool:
        await lease_all(producer, 1)
        with pytest.raises(EntryError, match=r"group 0 has 1,048,577 bytes, .* accepts 1,048,576 \(proto-max-bulk-len"):
            await producer.add(make_group(0), bytes((1 << 20) + 1))
        return await producer.fail(Lease(0, 1), 6)

    try:
        assert produce(server, origin, body) is True
    finally:
        client.config_set(*next(iter(before.items())))
        client.close()


def test_late_failure_of_an_older_attempt_ends_the_newer_one(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> list[bool]:
        await producer.admit(1, wanted=1)
        first = await producer.fail(Lease(0, 1), 5)
        say_again(producer)
        again = await producer.fail(Lease(0, 1), 5)
        await producer.admit(1, wanted=1)
        late = await producer.fail(Lease(0, 1), 7)
        return [first, again, late, await add(producer, origin, 0)]

    assert produce(server, origin, body) == [True, True, False, True]
    ledger = read_ledger(server, origin.run_id)
    assert ledger.tokens_dropped == {"failed": 12} and ledger.buffered == 1 and ledger.closes


def test_addition_said_again_after_its_commit_counts_as_a_duplicate(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> bool:
        await lease_all(producer, 1)
        await add(producer, origin, 0)
        consumer = Consumer(server, origin)
        consumer.commit(consumer.take(1, timeout_s=5), version=1)
        say_again(producer)
        return await add(producer, origin, 0)

    assert produce(server, origin, body) is True
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.generated, ledger.trained, ledger.dropped) == (1, 1, {})


def test_finished_run_leaves_groups_uncounted(server: Address, origin: Origin) -> None:
    async def body(producer: Producer) -> None:
        await lease_all(producer, 5)
        for n in range(3):
            await add(producer, origin, n)

    produce(server, origin, body)
    consumer = Consumer(server, origin)
    consumer.commit(consumer.take(2, timeout_s=5), version=1)
    ledger = finish(server, origin.run_id)
    assert (ledger.trained, ledger.buffered, ledger.in_flight, ledger.dropped) == (2, 0, 0, {"abandoned": 3})
    assert ledger.tokens_dropped == {"abandoned": 6} and ledger.closes
    assert finish(server, origin.run_id) == ledger


def test_consumed_groups_are_archived_out_of_order(server: Address, origin: Origin, tmp_path: Path) -> None:
    fill(server, origin, [3, 2, 1, 0])
    archive = Archive(tmp_path / "archive", origin)
    consumer = Consumer(server, origin, archive)
    for version in (1, 2):
        consumer.commit(consumer.take(2, timeout_s=5), version)
    consumer.close()
    steps = [
        (s.learner_version, [b.column("admission")[0].as_py() for b in s.groups])
        for s in read_steps(tmp_path / "archive")
    ]
    assert steps == [(0, [0, 1]), (1, [2, 3])]


def test_learner_killed_between_archive_and_commit_trains_a_step_twice(
    server: Address, origin: Origin, tmp_path: Path
) -> None:
    fill(server, origin, [0, 1, 2, 3])
    archive = Archive(tmp_path / "archive", origin)
    first = Consumer(server, origin, archive)
    entries = first.take(2, timeout_s=5)
    archive.append(0, [to_batch(e.group, origin.schema()) for e in entries])
    # The process dies here.
    archive.close()
    second = Consumer(server, origin, Archive(tmp_path / "archive", origin))
    assert second.version == 1
    assert read_ledger(server, origin.run_id).trained == 2
    entries = second.take(2, timeout_s=5)
    assert admissions(entries) == [2, 3]
    second.commit(entries, version=2)
    second.close()
    assert [s.learner_version for s in read_steps(tmp_path / "archive")] == [0, 1]


def test_archive_of_another_run_is_continued(server: Address, origin: Origin, tmp_path: Path) -> None:
    at_version(server, origin, 3)
    with pytest.raises(BufferUnavailable, match="is at version 3 of run .*, its archive at 0"):
        Consumer(server, origin, Archive(tmp_path / "archive", origin))


def test_entry_of_a_stranger_is_trained_or_stays(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1])
    client, k = connect(server), Keys.of(origin.run_id)
    ((_, fields),) = client.xrange(k.stream, count=1)
    client.xadd(k.stream, fields)
    client.xadd(k.stream, {"anything": b"\xff" * 9})
    for reading in (Reading(order="ready"), Reading(order="freshest"), Reading()):
        assert sorted(admissions(Consumer(server, origin, reading=reading).take(2, timeout_s=5))) == [0, 1]
    assert client.xlen(k.stream) == client.xlen(k.quarantine) == 2
    ledger = read_ledger(server, origin.run_id)
    assert (ledger.strangers, ledger.buffered, ledger.dropped) == (2, 2, {}) and ledger.closes
    client.close()


def test_payload_that_somebody_deleted_is_waited_for(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2])
    with connect(server) as client:
        client.delete(Keys.of(origin.run_id).payload(0))
    assert admissions(Consumer(server, origin).take(2, timeout_s=5)) == [1, 2]
    ledger = read_ledger(server, origin.run_id)
    assert ledger.dropped == {"poison": 1} and ledger.closes


def test_entry_that_somebody_deleted_takes_its_group_along(server: Address, origin: Origin) -> None:
    fill(server, origin, [0, 1, 2])
    with connect(server) as client:
        k = Keys.of(origin.run_id)
        ((entry_id, _),) = client.xrange(k.stream, count=1)
        client.xdel(k.stream, entry_id)
        consumer = Consumer(server, origin)
        consumer.commit(consumer.take(3, timeout_s=5), version=1)
        assert read_ledger(server, origin.run_id).trained == 3
        assert client.xlen(k.stream) == 0


def test_quarantine_grows_with_the_run(server: Address, origin: Origin) -> None:
    client, k = connect(server), Keys.of(origin.run_id)
    for n in range(150):
        client.xadd(k.stream, {"n": str(n)})
    with pytest.raises(DeadlineExceeded):
        Consumer(server, origin).take(1, timeout_s=0)
    assert client.xlen(k.stream) == 0 and client.xlen(k.quarantine) == 100
    assert read_ledger(server, origin.run_id).strangers == 150
    client.close()


def test_learner_that_raises_never_ends(server: Address, origin: Origin) -> None:
    """It dies with a fetch ahead going on, which must not keep the process."""
    code = f"""
from counterflow.buffer.connection import Address
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.trajectory import Origin
Consumer(Address({server.url!r}), Origin({origin.run_id!r}, "model", "tokenizer", "{{}}")).take(1, timeout_s=5)
raise SystemExit(3)
"""
    fill(server, origin, [0])
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


def test_run_removed_from_its_server_is_called_taken_over(server: Address, origin: Origin) -> None:
    consumer = Consumer(server, origin)
    forget(server, origin.run_id)
    with pytest.raises(BufferUnavailable, match=r"was removed from the buffer at .*: end this learner"):
        consumer.take(1, timeout_s=1)
