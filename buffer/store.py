"""The buffer: groups on one Redis stream, moved only by atomic scripts: each is trained once, and all are counted.

Actors hold a `Producer` (asyncio), the learner a `Consumer` (blocking). A group is leased when it is admitted, appended
once, read in admission order, and leaves the stream with the commit of the optimizer step that trained it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from importlib.resources import files

import redis
from redis.commands.core import AsyncScript, Script

from counterflow.buffer.connection import Address, asking, connect, connect_async
from counterflow.buffer.trajectory import Group, Origin, decode
from counterflow.errors import DeadlineExceeded, EntryError
from counterflow.records import Ledger

CONSUMER_GROUP = "learner"
_BLOCK_MS = 200


@dataclass(frozen=True)
class Keys:
    """The Redis keys of one run. The braces keep them on one node of a Redis Cluster."""

    state: str
    leases: str
    attempts: str
    added: str
    stream: str
    dropped: str
    quarantine: str

    @classmethod
    def of(cls, run_id: str) -> Keys:
        """The keys of the run called `run_id`."""
        return cls(**{field.name: f"counterflow:{{{run_id}}}:{field.name}" for field in fields(cls)})


@dataclass(frozen=True)
class Lease:
    """The right to generate group `admission`, for the `attempt`-th time."""

    admission: int
    attempt: int


@dataclass(frozen=True)
class Entry:
    """A group on the stream."""

    entry_id: bytes
    group: Group
    tokens: int


def _script(name: str) -> str:
    return (files("counterflow.buffer") / f"{name}.lua").read_text(encoding="utf-8")


class Producer:
    """An actor's side of the buffer. Every method raises BufferUnavailable when the server went away or refuses."""

    def __init__(self, address: Address, run_id: str, *, capacity_groups: int, lease_s: float, attempts: int) -> None:
        self._address, self._client = address, connect_async(address)
        self._keys = Keys.of(run_id)
        self._capacity_groups, self._lease_ms, self._attempts = capacity_groups, int(lease_s * 1000), attempts
        self._admit: AsyncScript = self._client.register_script(_script("admit"))
        self._add: AsyncScript = self._client.register_script(_script("add"))
        self._fail: AsyncScript = self._client.register_script(_script("fail"))

    async def admit(self, open_groups: int) -> Lease | None:
        """Lease the next group whose admission number is below `open_groups`; None when none may start now."""
        k = self._keys
        with asking(self._address, "the admission of a group"):
            n, attempt = await self._admit(
                keys=[k.state, k.leases, k.attempts, k.stream, k.dropped],
                args=[open_groups, self._capacity_groups, self._lease_ms, self._attempts],
            )
        return Lease(n, attempt) if n >= 0 else None

    async def add(self, admission: int, tokens: int, payload: bytes, attempt: int = 1) -> bool:
        """Append the finished group of the lease's `attempt`; False when another attempt's is there. Safe to repeat."""
        k = self._keys
        with asking(self._address, f"the addition of group {admission}"):
            return bool(
                await self._add(
                    keys=[k.state, k.leases, k.attempts, k.stream, k.added], args=[admission, tokens, payload, attempt]
                )
            )

    async def fail(self, admission: int, tokens: int) -> bool:
        """Give a lease back after `tokens` tokens in vain; False when the group was dropped as poison."""
        k = self._keys
        with asking(self._address, f"the return of group {admission}"):
            return bool(
                await self._fail(
                    keys=[k.state, k.leases, k.attempts, k.dropped], args=[admission, tokens, self._attempts]
                )
            )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class Consumer:
    """The learner's side of the buffer: batches of whole groups in admission order.

    A new consumer takes over what a dead one had read and not committed. Every method raises BufferUnavailable when
    the server went away or refuses.
    """

    def __init__(self, address: Address, run_id: str, origin: Origin) -> None:
        self._address, self._client = address, connect(address)
        self._keys = Keys.of(run_id)
        self._origin = origin
        self._commit: Script = self._client.register_script(_script("commit"))
        self._drop: Script = self._client.register_script(_script("drop"))
        self._arrived: dict[int, Entry] = {}
        self._dropped: set[int] = set()
        with asking(address, "the learner's arrival"):
            try:
                self._client.xgroup_create(self._keys.stream, CONSUMER_GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
            version, cursor = self._client.hmget(self._keys.state, "version", "cursor")
            self.version, self._cursor = int(version or 0), int(cursor or 0)
            self._claim_pending()

    def take(self, groups: int, timeout_s: float) -> list[Entry]:
        """The next `groups` groups in admission order, waiting until all are there.

        Raises:
            DeadlineExceeded: they are not there after `timeout_s` seconds; names the first missing one.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            wanted = self._wanted(groups)
            missing = [n for n in wanted if n not in self._arrived]
            if not missing:
                self._cursor = wanted[-1] + 1
                return [self._arrived.pop(n) for n in wanted]
            with asking(self._address, "the read of groups"):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        "the learner",
                        f"{len(missing)} of {groups} groups, the first of them number {missing[0]}: "
                        f"{self._whereabouts(missing[0])}",
                        timeout_s,
                    )
                idle = not self._read(groups)
                if idle:
                    self._claim_unanswered()
                if idle or missing[0] < max(self._arrived, default=0):
                    self._dropped = {int(n) for n in self._client.smembers(self._keys.dropped)}

    def commit(self, entries: Sequence[Entry], version: int) -> None:
        """Record that the step which made `version` trained `entries`: acknowledged and removed in one script.

        Safe to repeat. Refused when the version does not follow, or when an entry was trained before.
        """
        trained = [x for e in entries for x in (e.entry_id, e.group.admission, e.tokens)]
        cursor = max(e.group.admission for e in entries) + 1
        k = self._keys
        with asking(self._address, f"the commit of version {version}"):
            self._commit(keys=[k.state, k.stream, k.added], args=[CONSUMER_GROUP, version, cursor, *trained])
        self.version = version

    def depth(self) -> int:
        """Groups in the stream, those read and not yet committed included."""
        with asking(self._address, "the count of groups"):
            return int(self._client.xlen(self._keys.stream))

    def tokens_generated(self) -> int:
        """Response tokens that reached the buffer since the run began."""
        with asking(self._address, "the count of tokens"):
            return int(self._client.hget(self._keys.state, "tokens_generated") or 0)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _wanted(self, groups: int) -> list[int]:
        wanted: list[int] = []
        n = self._cursor
        while len(wanted) < groups:
            if n not in self._dropped:
                wanted.append(n)
            n += 1
        return wanted

    def _read(self, count: int) -> bool:
        """Receive up to `count` new entries, waiting a moment for the first; False when none came."""
        answer = self._client.xreadgroup(
            CONSUMER_GROUP, "learner", {self._keys.stream: ">"}, count=count, block=_BLOCK_MS
        )
        for _, entries in answer or []:
            for entry_id, values in entries:
                self._receive(entry_id, values)
        return bool(answer)

    def _claim_unanswered(self) -> None:
        """The server counts entries as read that a lost reply never brought here."""
        if self._client.xpending(self._keys.stream, CONSUMER_GROUP)["pending"] > len(self._arrived):
            self._claim_pending()

    def _claim_pending(self) -> None:
        start: bytes | str = "0-0"
        while True:
            start, entries, *_ = self._client.xautoclaim(
                self._keys.stream, CONSUMER_GROUP, "learner", min_idle_time=0, start_id=start, count=256
            )
            for entry_id, values in entries:
                self._receive(entry_id, values)
            if start == b"0-0":
                return

    def _receive(self, entry_id: bytes, values: dict[bytes, bytes]) -> None:
        try:
            group = decode(values.get(b"payload", b""), self._origin)
            if values.get(b"n") != str(group.admission).encode():
                raise EntryError(f"the entry says group {values.get(b'n')!r}, its payload says {group.admission}")
        except EntryError as error:
            self._quarantine(entry_id, values, str(error))
            return
        self._arrived[group.admission] = Entry(entry_id, group, group.response_tokens)

    def _quarantine(self, entry_id: bytes, values: dict[bytes, bytes], detail: str) -> None:
        k, n, tokens = self._keys, values.get(b"n", b""), values.get(b"tokens", b"0")
        known = all(re.fullmatch(rb"\d{1,15}", number) for number in (n, tokens))
        self._drop(
            keys=[k.state, k.stream, k.dropped, k.quarantine, k.added],
            args=[CONSUMER_GROUP, entry_id, n if known else "", tokens, "poison", detail, 1],
        )
        if known:
            self._dropped.add(int(n))

    def _whereabouts(self, admission: int) -> str:
        lease = self._client.zscore(self._keys.leases, admission)
        if lease is None:
            admitted = int(self._client.hget(self._keys.state, "admitted") or 0)
            return "not admitted yet (do the actors serve a new enough version?)" if admission >= admitted else "lost"
        return f"being generated, lease ends at Unix time {lease / 1000:.0f} s"


def read_ledger(address: Address, run_id: str) -> Ledger:
    """Where every group of the run is, read in one transaction.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    client, k = connect(address), Keys.of(run_id)
    try:
        with asking(address, "the reading of the ledger"), client.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(k.state).xlen(k.stream).zcard(k.leases)
            raw, buffered, in_flight = pipeline.execute()
    finally:
        client.close()
    state = {key.decode(): int(value) for key, value in raw.items()}
    return Ledger(
        generated=state.get("generated", 0),
        trained=state.get("trained", 0),
        buffered=buffered,
        in_flight=in_flight,
        dropped=_reasons(state, "dropped:"),
        tokens_generated=state.get("tokens_generated", 0),
        tokens_trained=state.get("tokens_trained", 0),
        tokens_buffered=state.get("tokens_buffered", 0),
        tokens_dropped=_reasons(state, "tokens_dropped:"),
    )


def forget(address: Address, run_id: str) -> None:
    """Remove everything the run left on the server: groups, ledger and quarantine.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    client = connect(address)
    try:
        with asking(address, f"the removal of run {run_id}"):
            client.unlink(*astuple(Keys.of(run_id)))
    finally:
        client.close()


def _reasons(state: dict[str, int], prefix: str) -> dict[str, int]:
    return {key.removeprefix(prefix): value for key, value in sorted(state.items()) if key.startswith(prefix)}
