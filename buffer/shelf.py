"""The learner's shelf: groups on the stream, fetched by their numbers, checked and decoded, some ahead of their turn.

What cannot be a group of the run goes to quarantine here. Nothing here chooses what is trained. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import redis

from counterflow.buffer.codec import decode
from counterflow.buffer.connection import Address, patiently
from counterflow.buffer.standing import Row
from counterflow.buffer.store import Keys, script
from counterflow.buffer.trajectory import Group, Origin, Passage
from counterflow.errors import EntryError

_CHUNK = 32
_QUARANTINED = 100
"""Entries that the quarantine keeps: the latest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A group on the stream."""

    entry_id: bytes
    group: Group
    added_at: int
    """The learner's version when the group was added, as far as the server knew it."""
    taken_at: int = -1
    """The learner's version when it first took the group; -1 while it has not."""

    @property
    def passage(self) -> Passage:
        """The group's way through the buffer."""
        return Passage(self.added_at, self.taken_at)


class Shelf:
    """Entries fetched and not yet let go.

    Args:
        term: of the learner; drops are refused when another has taken over.
    """

    def __init__(self, address: Address, client: redis.Redis, keys: Keys, origin: Origin, term: str) -> None:
        self._address, self._client, self._keys, self._origin, self._term = address, client, keys, origin, term
        self._drop = client.register_script(script("drop"))
        self._entries: dict[int, Entry] = {}

    def fetch(self, rows: Mapping[int, Row], newest_version: int) -> list[Entry] | None:
        """The entries of these groups, in this order; None when one of them had to go to quarantine.

        Args:
            newest_version: no token can be of a later one.

        Raises:
            BufferUnavailable: the server stays away, or refuses.
        """
        self._entries = {n: e for n, e in self._entries.items() if n not in rows or e.entry_id == rows[n].entry_id}
        bad = []
        for n, payload in self._ask("the read of groups", lambda: self._read(rows)):
            try:
                self._entries[n] = self._decode(n, rows[n], payload, newest_version)
            except EntryError as error:
                bad.append(n)
                self._call_drop(rows[n].entry_id, str(n), "poison", str(error), _QUARANTINED)
        return None if bad else [self._entries[n] for n in rows]

    def fetch_ahead(self, rows: Mapping[int, Row], newest_version: int) -> bool:
        """Fetch these groups before their turn; False when something keeps one of them from being here.

        Raises:
            redis.RedisError, OSError: the server does not answer now.
        """
        try:
            for n, payload in self._read(rows):
                self._entries[n] = self._decode(n, rows[n], payload, newest_version)
        except EntryError:
            return False
        return True

    def take(self, numbers: Sequence[int], version: int) -> list[Entry]:
        """The entries of these groups, fetched before, now that a learner of `version` takes them."""
        for n in numbers:
            if self._entries[n].taken_at < 0:
                self._entries[n] = replace(self._entries[n], taken_at=version)
        return [self._entries[n] for n in numbers]

    def keep(self, numbers: Container[int]) -> None:
        """Let go of all groups but these."""
        self._entries = {n: entry for n, entry in self._entries.items() if n in numbers}

    def drop(self, n: int, row: Row, reason: str) -> None:
        """Drop a group untrained.

        Raises:
            BufferUnavailable: the server stays away, or refuses.
        """
        self._entries.pop(n, None)
        self._call_drop(row.entry_id, str(n), reason, "", quarantined=0)

    def sweep(self) -> None:
        """Put entries into quarantine that no actor of the run added: they are not in its directory.

        Raises:
            BufferUnavailable: the server stays away, or refuses.
        """
        start = b"-"
        while True:
            entries = self._ask("the search for strangers", partial(self._range, start))
            # Read after the entries: what is added meanwhile is in both.
            rows = self._ask("the directory of groups", lambda: self._client.hvals(self._keys.buffered))
            known = {Row.parse(row).entry_id for row in rows}
            for entry_id, _ in entries:
                if entry_id not in known:
                    self._call_drop(entry_id, "", "", "no actor of this run added it", _QUARANTINED)
            if len(entries) < _CHUNK:
                return
            start = b"(" + entries[-1][0]

    def _read(self, rows: Mapping[int, Row]) -> list[tuple[int, bytes]]:
        """Number and payload of those that are not here; an empty one where it is gone."""
        missing = [n for n in rows if n not in self._entries]
        payloads: list[Any] = []
        for at in range(0, len(missing), _CHUNK):
            payloads += self._client.mget([self._keys.payload(n) for n in missing[at : at + _CHUNK]])
        return [(n, payload or b"") for n, payload in zip(missing, payloads, strict=True)]

    def _range(self, start: bytes) -> Any:
        return self._client.xrange(self._keys.stream, start, "+", count=_CHUNK)

    def _decode(self, n: int, row: Row, payload: bytes, newest_version: int) -> Entry:
        group = decode(payload, self._origin, keep=True)
        if group.admission != n:
            raise EntryError(f"the entry is of group {n}, its payload of group {group.admission}")
        if group.response_tokens != row.tokens:
            raise EntryError(f"the entry says {row.tokens} tokens, its payload has {group.response_tokens}")
        if group.newest_version is not None and group.newest_version > newest_version:
            raise EntryError(f"a token of version {group.newest_version}, while the learner's is {newest_version}")
        return Entry(row.entry_id, group, row.added_at)

    def _call_drop(self, entry_id: bytes, n: str, reason: str, detail: str, quarantined: int) -> None:
        k = self._keys
        keys = [k.state, k.stream, k.buffered, k.uses, k.quarantine, k.payload(n)]
        args = [self._term, entry_id, n, reason, detail, quarantined]
        self._ask(f"the drop of group {n or entry_id.decode()}", lambda: self._drop(keys=keys, args=args))

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        return patiently(self._address, what, call)
