"""What a run keeps on its Redis server: its keys, the scripts that alone move groups, the ledger they keep.

A group is leased when it is admitted, appended to the stream once, and leaves it with the commit of the optimizer step
that trained it, or dropped with a reason. Every script changes groups and ledger together, or neither. Actors use a
`Producer`, the learner a `Consumer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

import redis

from counterflow.buffer.connection import Address, asking, connect, patiently
from counterflow.records import Ledger

REMEMBERED_ANSWERS = 10_000
"""Answers to producers that the server remembers, so that a call whose answer was lost may be repeated."""


@dataclass(frozen=True)
class Keys:
    """The Redis keys of one run. The braces keep them on one node of a Redis Cluster."""

    state: str
    """Hash: the ledger's counters, the policy version, the learner's term, the next admission number."""
    leases: str
    """Sorted set: admission numbers being generated, by the Unix time in ms at which their lease ends."""
    producers: str
    """Hash: the latest leases that each producer was given, at least until they have run out."""
    owners: str
    """Hash: the producer that was given each leased group, and some that are leased no more."""
    attempts: str
    """Hash: how often each leased group was given out."""
    stream: str
    """Stream: number and tokens of the groups, in the order of their arrival."""
    buffered: str
    """Hash, the directory: of each group on the stream its entry id, tokens, bytes, oldest and newest version, and the
    learner's version at its addition."""
    uses: str
    """Hash: steps that trained a group which is still on the stream."""
    answered: str
    """Sorted set: the latest answers to producers."""
    quarantine: str
    """Stream: the latest entries that could not be read, with the reason."""
    payloads: str
    """How the keys begin that hold the groups on the stream, as Arrow: strings, which the server need not copy."""

    @classmethod
    def of(cls, run_id: str) -> Keys:
        """The keys of the run called `run_id`."""
        return cls(**{field.name: f"counterflow:{{{run_id}}}:{field.name}" for field in fields(cls)})

    def payload(self, n: int | str) -> str:
        """The key of group `n` as Arrow: there as long as the directory has the group."""
        return f"{self.payloads}:{n}"


@cache
def script(name: str) -> str:
    """The text of the script `name`.lua."""
    return (files("counterflow.buffer") / f"{name}.lua").read_text(encoding="utf-8")


def read_ledger(address: Address, run_id: str) -> Ledger:
    """Where every group of the run is, read in one transaction.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    client = connect(address)
    try:
        return ledger_by(client, address, run_id)
    finally:
        client.close()


def ledger_by(client: redis.Redis, address: Address, run_id: str) -> Ledger:
    """The same by a client that is there already."""
    k = Keys.of(run_id)

    def read() -> Ledger:
        with client.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(k.state)
            pipeline.hlen(k.buffered)
            pipeline.zcard(k.leases)
            return _as_ledger(*pipeline.execute())

    return patiently(address, "the reading of the ledger", read)


def finish(address: Address, run_id: str) -> Ledger:
    """Count what a completed run leaves untrained as abandoned; returns the last ledger. Safe to repeat.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    client, k = connect(address), Keys.of(run_id)
    try:
        patiently(address, f"the end of run {run_id}", lambda: _abandon_rest(client, k))
        return ledger_by(client, address, run_id)
    finally:
        client.close()


def expire_leases(address: Address, run_id: str, holder: str) -> int:
    """End the leases of an actor that died, so that its groups are given out again at once; returns how many.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    client, k = connect(address), Keys.of(run_id)
    try:
        expire = client.register_script(script("expire"))
        found: int = patiently(
            address,
            f"the end of the leases of {holder}",
            lambda: expire(keys=[k.leases, k.owners], args=[f"{holder}:"]),
        )
        return found
    finally:
        client.close()


def forget(address: Address, run_id: str) -> None:
    """Remove everything the run left on the server: groups, ledger and quarantine.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    client, k = connect(address), Keys.of(run_id)
    try:
        with asking(address, f"the removal of run {run_id}"):
            _abandon_rest(client, k)
            client.unlink(*astuple(k))
    finally:
        client.close()


def _abandon_rest(client: redis.Redis, k: Keys) -> None:
    """Take everything from the stream. A script has to be told all keys: they are read anew where they changed."""
    end = client.register_script(script("finish"))
    while True:
        numbers: Any = client.hkeys(k.buffered)
        payloads = [k.payload(n.decode()) for n in numbers]
        if end(keys=[k.state, k.leases, k.attempts, k.stream, k.buffered, k.uses, *payloads], args=numbers):
            return


def _as_ledger(state: Mapping[bytes, bytes], buffered: int, in_flight: int) -> Ledger:
    counts = {key.decode(): int(value) for key, value in sorted(state.items()) if key not in (b"term", b"server")}

    def by_reason(prefix: str) -> dict[str, int]:
        return {key.removeprefix(prefix): value for key, value in counts.items() if key.startswith(prefix)}

    return Ledger(
        generated=counts.get("generated", 0),
        trained=counts.get("trained", 0),
        buffered=buffered,
        in_flight=in_flight,
        dropped=by_reason("dropped:"),
        tokens_generated=counts.get("tokens_generated", 0),
        tokens_trained=counts.get("tokens_trained", 0),
        tokens_buffered=counts.get("tokens_buffered", 0),
        tokens_dropped=by_reason("tokens_dropped:"),
        policy_version=counts.get("version", 0),
        bytes_buffered=counts.get("bytes_buffered", 0),
        reissued=counts.get("reissued", 0),
        regenerated=counts.get("regenerated", 0),
        strangers=counts.get("strangers", 0),
    )
