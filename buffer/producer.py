"""An actor's side of the buffer: leases for groups to generate, and the groups that came of them (asyncio)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from counterflow.buffer.connection import Address, connect_async, largest_value_bytes, patiently_async
from counterflow.buffer.flush import Flush
from counterflow.buffer.store import REMEMBERED_ANSWERS, Keys, script
from counterflow.buffer.trajectory import Group
from counterflow.errors import EntryError

_MOST_AT_ONCE_BYTES = 2 << 20
"""Of additions that travel together: more takes new memory each time, and keeps the learner waiting for the server."""


class Closed(Enum):
    """Why no more groups may start now."""

    LAG_BUDGET = 1
    """The next one might be trained by too late a version."""
    FULL = 2
    """The buffer holds as many groups or bytes as it may."""


@dataclass(frozen=True)
class Lease:
    """The right to generate group `admission`, for the `attempt`-th time."""

    admission: int
    attempt: int


@dataclass(frozen=True)
class Capacity:
    """What the buffer may hold before admission pauses. The groups of one step always find room."""

    groups: int
    bytes: int
    groups_per_step: int


@dataclass(frozen=True)
class _Addition:
    """A finished group on its way to the server."""

    call: str
    group: Group
    payload: bytes | memoryview

    def arguments(self) -> list[str | int]:
        """As add.lua takes them."""
        oldest, newest = (-1 if v is None else v for v in (self.group.oldest_version, self.group.newest_version))
        return [self.call, self.group.admission, self.group.response_tokens, oldest, newest]


class Producer:
    """Leases groups and adds them. Every call is safe to repeat, and is repeated while the server is away.

    Every method raises BufferUnavailable when the server stays away, or refuses.

    Args:
        lease_s: a group not back this many seconds after its admission is given out again.
        attempts: how often a group is tried before it is dropped as poison.
        holder: whose leases they are, for `expire_leases`.
    """

    def __init__(
        self,
        address: Address,
        run_id: str,
        *,
        capacity: Capacity,
        lease_s: float,
        attempts: int,
        holder: str = "producer",
    ) -> None:
        self._address, self._client = address, connect_async(address)
        self._keys = Keys.of(run_id)
        self._capacity, self._lease_ms, self._attempts = capacity, int(lease_s * 1000), attempts
        self._name, self._calls = f"{holder}:{secrets.token_hex(8)}", 0
        self._largest_bytes: int | None = None
        self._flush = Flush(self._send, lambda addition: len(addition.payload), _MOST_AT_ONCE_BYTES)
        self._admit, self._fail = (self._client.register_script(script(name)) for name in ("admit", "fail"))

    async def admit(self, open_groups: int, wanted: int) -> tuple[list[Lease], Closed | None]:
        """Lease up to `wanted` groups with admission numbers below `open_groups`; if fewer, also why."""
        k, c = self._keys, self._capacity
        keys = [k.state, k.leases, k.attempts, k.stream, k.producers, k.buffered, k.owners]
        limits = [wanted, open_groups, c.groups, c.bytes, c.groups_per_step, self._lease_ms, self._attempts]
        args = [self._name, self._call(), *limits]
        why, *numbers = await patiently_async(
            self._address, "the admission of groups", lambda: self._admit(keys=keys, args=args)
        )
        leases = [Lease(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return leases, Closed(why) if why else None

    async def add(self, group: Group, payload: bytes | memoryview) -> bool:
        """Append a finished group, `payload` in Arrow; False when another of its number is there.

        Raises:
            EntryError: the group is larger than the server accepts.
        """
        await self._check_size(group.admission, len(payload))
        return await self._flush.add(_Addition(self._call(), group, payload))

    async def fail(self, lease: Lease, tokens: int) -> bool:
        """Give a lease back after `tokens` tokens in vain; False when the group will not be tried again."""
        k = self._keys
        keys = [k.state, k.leases, k.attempts, k.answered]
        args = [self._call(), lease.admission, lease.attempt, tokens, self._attempts, REMEMBERED_ANSWERS]
        what = f"the return of group {lease.admission}"
        return bool(await patiently_async(self._address, what, lambda: self._fail(keys=keys, args=args)))

    async def close(self) -> None:
        """Close the connections."""
        await self._flush.close()
        await self._client.aclose()

    def _call(self) -> str:
        """A name for one call, however often it is repeated."""
        self._calls += 1
        return f"{self._name}:{self._calls}"

    async def _send(self, additions: Sequence[_Addition]) -> list[bool]:
        k = self._keys
        payloads = [k.payload(addition.group.admission) for addition in additions]
        keys = [k.state, k.leases, k.attempts, k.stream, k.buffered, k.answered, *payloads]
        args = [REMEMBERED_ANSWERS, *(arg for addition in additions for arg in addition.arguments())]

        async def call() -> list[int]:
            async with self._client.pipeline(transaction=True) as pipeline:
                for key, addition in zip(payloads, additions, strict=True):
                    pipeline.set(key, addition.payload, nx=True)
                # Not by its hash: a server that had just been started again would keep the payloads and refuse it.
                pipeline.eval(script("add"), len(keys), *keys, *args)
                answers: list[int] = (await pipeline.execute())[-1]
                return answers

        what = f"the addition of {'group' if len(additions) == 1 else 'groups'} " + ", ".join(
            str(addition.group.admission) for addition in additions
        )
        return [bool(kept) for kept in await patiently_async(self._address, what, call)]

    async def _check_size(self, admission: int, size: int) -> None:
        if self._largest_bytes is None:
            self._largest_bytes = await largest_value_bytes(self._address, self._client)
        if size > self._largest_bytes:
            raise EntryError(
                f"group {admission} has {size:,} bytes, the server at {self._address.shown} accepts "
                f"{self._largest_bytes:,} (proto-max-bulk-len): lower sampling.max_tokens or "
                "admission.samples_per_group, or raise the server's limit"
            )
