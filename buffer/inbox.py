"""The learner's inbox: entries of the stream, received, checked and decoded; what cannot be trained is dropped here.

One thread at a time may use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import redis

from counterflow.buffer.codec import from_batch, read_batch
from counterflow.buffer.connection import Address, patiently
from counterflow.buffer.store import CONSUMER_GROUP, Keys, script
from counterflow.buffer.trajectory import Group, Origin
from counterflow.errors import EntryError

_BLOCK_MS = 100
_CLAIM_COUNT = 64
_QUARANTINED = 1000
"""Entries that the quarantine keeps: about so many of the latest."""

Judge = Callable[[Group], str | None]
"""Why a group is dropped untrained, or None. Raises EntryError when it cannot be one of the run's."""


@dataclass(frozen=True)
class Entry:
    """A group on the stream, and the same as Arrow; the group's arrays are views of the batch."""

    entry_id: bytes
    group: Group
    batch: pa.RecordBatch


class Inbox:
    """Entries received and not yet taken, by admission number.

    Every method raises BufferUnavailable when the server stays away, or refuses.

    Args:
        name: of the consumer on the stream; no other living consumer has it.
    """

    def __init__(
        self, address: Address, client: redis.Redis, keys: Keys, origin: Origin, name: str, judge: Judge
    ) -> None:
        self._address, self._client, self._keys, self._origin, self._name = address, client, keys, origin, name
        self._judge = judge
        self._drop = client.register_script(script("drop"))
        self.entries: dict[int, Entry] = {}
        self.dropped: set[int] = set()
        """Admission numbers of the groups dropped here."""

    def receive(self, count: int) -> bool:
        """Receive up to `count` new entries, waiting a moment for the first; False when none came."""
        answer: Any = self._ask(
            "the read of groups",
            lambda: self._client.xreadgroup(
                CONSUMER_GROUP, self._name, {self._keys.stream: ">"}, count=count, block=_BLOCK_MS
            ),
        )
        for _, entries in answer or []:
            for entry_id, values in entries:
                self._accept(entry_id, values)
        return bool(answer)

    def claim(self) -> None:
        """Take over what other consumers read and did not commit, and what a lost reply never brought here."""
        start: bytes | str = "0-0"
        while True:
            answer: Any = self._ask("the claim of groups", partial(self._claim_from, start))
            start, entries = answer[:2]
            for entry_id, values in entries:
                self._accept(entry_id, values)
            if start == b"0-0":
                return

    def pending(self) -> int:
        """Entries that were read, by whomever, and not committed."""
        answer: Any = self._ask(
            "the count of groups read", lambda: self._client.xpending(self._keys.stream, CONSUMER_GROUP)
        )
        return int(answer["pending"])

    def drop(self, entry: Entry, reason: str) -> None:
        """Drop an entry untrained."""
        self.entries.pop(entry.group.admission, None)
        self._drop_entry(entry.entry_id, entry.group.admission, reason, "", quarantined=0)

    def _claim_from(self, start: bytes | str) -> Any:
        return self._client.xautoclaim(
            self._keys.stream, CONSUMER_GROUP, self._name, min_idle_time=0, start_id=start, count=_CLAIM_COUNT
        )

    def _accept(self, entry_id: bytes, values: dict[bytes, bytes]) -> None:
        try:
            batch = read_batch(values.get(b"payload", b""), self._origin)
            group = from_batch(batch)
            said = values.get(b"n"), values.get(b"tokens")
            held = str(group.admission).encode(), str(group.response_tokens).encode()
            if said != held:
                raise EntryError(f"the entry says group and tokens {said}, its payload says {held}")
            reason = self._judge(group)
        except EntryError as error:
            self._quarantine(entry_id, values, str(error))
            return
        entry = Entry(entry_id, group, batch)
        if reason is not None:
            self.drop(entry, reason)
            return
        self.entries[group.admission] = entry

    def _quarantine(self, entry_id: bytes, values: dict[bytes, bytes], detail: str) -> None:
        said = values.get(b"n", b"")
        n = int(said) if re.fullmatch(rb"\d{1,15}", said) else -1
        self._drop_entry(entry_id, n, "poison", detail, quarantined=_QUARANTINED)

    def _drop_entry(self, entry_id: bytes, admission: int, reason: str, detail: str, quarantined: int) -> None:
        k = self._keys
        self.dropped.add(admission)
        self._ask(
            f"the drop of group {admission}",
            lambda: self._drop(
                keys=[k.state, k.stream, k.buffered, k.uses, k.quarantine],
                args=[CONSUMER_GROUP, self._name, entry_id, admission, reason, detail, quarantined],
            ),
        )

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        return patiently(self._address, what, call)
