"""The learner's side of the buffer: batches of whole groups, each group trained exactly as often as it was asked for.

A step's groups are archived and synced to disk before the server is told, so that whatever dies in between, the archive
knows what was trained. A consumer that arrives takes over from the one before it, whose calls are refused from then on.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import from_batch
from counterflow.buffer.connection import Address, connect, patiently
from counterflow.buffer.inbox import Entry, Inbox
from counterflow.buffer.reading import Reading, next_freshest, next_in_admission_order, next_ready
from counterflow.buffer.store import CONSUMER_GROUP, Keys, read_ledger, script
from counterflow.buffer.trajectory import Group, Origin
from counterflow.errors import BufferUnavailable, DeadlineExceeded, EntryError
from counterflow.records import Ledger

_log = logging.getLogger(__name__)

_ALL_THERE_IS = 1 << 20


@dataclass(frozen=True)
class _Standing:
    """How the run stands on its server, read in one transaction."""

    server: str
    """A name of the server process: another one after each start."""
    term: bytes
    version: int
    admitted: int
    leases: dict[int, float]
    """Unix time in seconds at which each lease ends."""
    buffered: set[int]


class Consumer:
    """Takes batches of groups and commits the steps that trained them.

    Every method raises BufferUnavailable when the server stays away, or refuses.

    Args:
        archive: where a step's groups go before they leave the server. None keeps nothing: steps that the server
            itself forgets are an error then.
    """

    def __init__(
        self, address: Address, origin: Origin, archive: Archive | None = None, reading: Reading | None = None
    ) -> None:
        self._address, self._client, self._archive = address, connect(address), archive
        self._run_id, self._keys = origin.run_id, Keys.of(origin.run_id)
        self._reading = reading or Reading()
        self._term = f"learner-{secrets.token_hex(8)}".encode()
        self._commit = self._client.register_script(script("commit"))
        self._inbox = Inbox(address, self._client, self._keys, origin, self._term.decode(), self._judge)
        self._used: list[Entry] = []
        self._taken: set[int] = set()
        self._lost: set[int] = set()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._prefetching: Future[None] | None = None
        self._stop = threading.Event()
        self._make_consumer_group()
        self._previous_term = self._standing().term
        self._hold_term()
        standing = self._standing()
        self._server, self._buffered = standing.server, standing.buffered
        self.version = standing.version
        if archive is not None:
            self.version = 0 if archive.last_version is None else archive.last_version + 1
        self._repeat_steps(standing.version)
        self._inbox.claim()

    def take(self, groups: int, timeout_s: float) -> list[Entry]:
        """The next `groups` groups, waiting until all are there. The batch after them is fetched while they are used.

        Raises:
            DeadlineExceeded: they are not there after `timeout_s` seconds; says what is missing.
        """
        self._join_prefetch()
        self._inbox.entries.update({e.group.admission: e for e in self._used})
        self._used = []
        deadline = time.monotonic() + timeout_s
        while True:
            standing = self._check_standing()
            self._inbox.dropped.clear()
            self._drop_stale()
            chosen = self._choose(groups, standing)
            if len(chosen) == groups and all(n in self._inbox.entries for n in chosen):
                break
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the learner", self._missing(groups, chosen, standing), timeout_s)
            self._receive(_ALL_THERE_IS if self._reading.order == "freshest" else groups)
        self._taken.update(chosen)
        entries = [self._inbox.entries.pop(n) for n in chosen]
        self._stop.clear()
        self._prefetching = self._background.submit(self._prefetch, groups)
        return entries

    def commit(self, entries: Sequence[Entry], version: int) -> None:
        """Record that the step which made `version` trained `entries`: in the archive, then on the server, once.

        Raises:
            BufferUnavailable: also when `version` does not follow, or a group was trained before.
        """
        if version != self.version + 1:
            raise BufferUnavailable(f"the commit of version {version} does not follow version {self.version}")
        self._check_standing()
        trained = [(e.group.admission, e.group.response_tokens) for e in entries]
        if strangers := {n for n, _ in trained} - self._taken:
            raise BufferUnavailable(
                f"groups {sorted(strangers)} were not taken, or trained before: take each batch anew"
            )
        if self._archive is not None:
            self._archive.append(self.version, [e.batch for e in entries])
        self.version = version
        try:
            self._commit_step(version, trained, recovering=bool(self._lost))
        except BufferUnavailable:
            # The server may have been started again since it was last asked; coming back to it repeats the step.
            if self._archive is None or self._standing().server == self._server:
                raise
            self._check_standing()
        self._buffered.difference_update(n for n, _ in trained)
        self._taken.difference_update(n for n, _ in trained)
        self._lost.difference_update(n for n, _ in trained)
        if self._reading.uses > 1:
            left = self._standing().buffered
            self._used += [e for e in entries if e.group.admission in left]

    def ledger(self) -> Ledger:
        """Where every group of the run is now."""
        return read_ledger(self._address, self._run_id)

    def close(self) -> None:
        """Stop fetching; close the connections and the archive."""
        self._stop.set()
        self._background.shutdown()
        self._client.close()
        if self._archive is not None:
            self._archive.close()

    def _judge(self, group: Group) -> str | None:
        newest = group.newest_version
        if newest is not None and newest > self.version:
            raise EntryError(f"a token of version {newest}, while the learner's is {self.version}")
        rewards = {t.reward for t in group.trajectories if t.reward is not None}
        return "filtered" if self._reading.drop_equal_rewards and len(rewards) < 2 else None

    def _drop_stale(self) -> None:
        if self._reading.order == "admission":
            return
        oldest_allowed = self.version - self._reading.max_lag
        for entry in list(self._inbox.entries.values()):
            oldest = entry.group.oldest_version
            if oldest is not None and oldest < oldest_allowed:
                self._inbox.drop(entry, "stale")

    def _choose(self, groups: int, standing: _Standing) -> list[int]:
        """Admission numbers of the next batch; some may not be here yet."""
        entries, buffered = self._inbox.entries, standing.buffered - self._taken
        if self._reading.order == "admission":
            leased = standing.leases.keys() - self._taken
            return next_in_admission_order(groups, buffered | leased, standing.admitted)
        if self._reading.order == "ready":
            return next_ready(groups, entries)
        return [] if buffered - entries.keys() else next_freshest(groups, entries)

    def _missing(self, groups: int, chosen: Sequence[int], standing: _Standing) -> str:
        missing = [n for n in chosen if n not in self._inbox.entries]
        if not missing:
            return f"{groups - len(chosen)} of {groups} groups: {len(standing.leases)} are being generated"
        first = missing[0]
        if first in standing.leases:
            where = f"being generated, lease ends at Unix time {standing.leases[first]:.0f} s"
        elif first in standing.buffered:
            where = "on the stream, not received yet"
        else:
            where = "not admitted yet (do the actors serve a new enough version?)"
        return f"{len(missing)} of {groups} groups, the first of them number {first}: {where}"

    def _receive(self, count: int) -> None:
        # The server counts entries as read that a lost reply never brought here.
        if not self._inbox.receive(count) and self._inbox.pending() > len(self._inbox.entries) + len(self._taken):
            self._inbox.claim()
            for n in self._taken:
                self._inbox.entries.pop(n, None)

    def _prefetch(self, groups: int) -> None:
        while not self._stop.is_set() and len(self._inbox.entries) < groups:
            self._inbox.receive(groups)

    def _join_prefetch(self) -> None:
        if self._prefetching is not None:
            self._stop.set()
            future, self._prefetching = self._prefetching, None
            future.result()

    def _check_standing(self) -> _Standing:
        """How the run stands, this learner still being the one that holds it and the server knowing all it was told."""
        standing = self._standing()
        if standing.server != self._server:
            self._join_prefetch()
            self._come_back(standing)
            standing = self._standing()
        if standing.term != self._term:
            raise self._superseded()
        self._buffered = standing.buffered
        return standing

    def _come_back(self, standing: _Standing) -> None:
        """The server was started again and may have lost the end of its log, this learner's doings included.

        Groups lost untrained are leased out anew.
        """
        if standing.term not in (self._term, self._previous_term):
            raise self._superseded()
        self._make_consumer_group()
        self._hold_term()
        repeated = self._repeat_steps(standing.version)
        self._inbox.entries.clear()
        self._inbox.claim()
        self._server, now = standing.server, self._standing().buffered
        self._lost = self._taken - now - repeated
        for n in self._taken:
            self._inbox.entries.pop(n, None)
        gone = self._buffered - now - repeated - self._taken - self._inbox.dropped
        self._ask("the count of lost groups", lambda: self._client.hincrby(self._keys.state, "regenerated", len(gone)))
        if gone:
            self._ask(
                "the lease of lost groups",
                lambda: self._client.zadd(self._keys.leases, dict.fromkeys(map(str, gone), 0), xx=True),
            )
        _log.warning(
            "the buffer's server was started again: it had lost %d steps, which it was told anew, and %d groups, which "
            "are generated again",
            self.version - standing.version,
            len(gone),
        )

    def _repeat_steps(self, version: int) -> set[int]:
        """Tell the server the archived steps past `version`; returns the admission numbers that they trained."""
        if version > self.version or (version < self.version and self._archive is None):
            raise BufferUnavailable(
                f"the buffer at {self._address.shown} is at version {version} of run {self._run_id}, its archive at "
                f"{self.version}: give the run its own server and its own folder"
            )
        repeated: set[int] = set()
        if version < self.version and self._archive is not None:
            for step in read_steps(self._archive.folder, start=version):
                groups = [from_batch(batch) for batch in step.groups]
                trained = [(g.admission, g.response_tokens) for g in groups]
                self._commit_step(step.learner_version + 1, trained, recovering=True)
                repeated.update(n for n, _ in trained)
        return repeated

    def _commit_step(self, version: int, trained: Sequence[tuple[int, int]], recovering: bool) -> None:
        k = self._keys
        numbers = [number for pair in trained for number in pair]
        args = [CONSUMER_GROUP, self._term, version, self._reading.uses, int(recovering), *numbers]
        keys = [k.state, k.leases, k.attempts, k.stream, k.buffered, k.uses]
        self._ask(f"the commit of version {version}", lambda: self._commit(keys=keys, args=args))

    def _standing(self) -> _Standing:
        k = self._keys

        def read() -> list[Any]:
            with self._client.pipeline(transaction=True) as pipeline:
                pipeline.hmget(k.state, "term", "version", "admitted")
                pipeline.zrange(k.leases, 0, -1, withscores=True)
                pipeline.hkeys(k.buffered)
                answers: list[Any] = pipeline.execute()
            return answers

        # The name first: a server that starts in between is then found out the next time.
        server = self._ask("the state of the run", self._name_of_server)
        (term, version, admitted), leases, buffered = self._ask("the state of the run", read)
        return _Standing(
            server=server,
            term=term or b"",
            version=int(version or 0),
            admitted=int(admitted or 0),
            leases={int(n): ends_ms / 1000 for n, ends_ms in leases},
            buffered={int(n) for n in buffered},
        )

    def _name_of_server(self) -> str:
        if isinstance(self._client, redis.RedisCluster):
            node = self._client.get_node_from_key(self._keys.state)
            return str(self._client.info("server", target_nodes=node)["run_id"])
        return str(self._client.info("server")["run_id"])

    def _make_consumer_group(self) -> None:
        def make() -> None:
            try:
                self._client.xgroup_create(self._keys.stream, CONSUMER_GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

        self._ask("the learner's arrival", make)

    def _hold_term(self) -> None:
        self._ask("the learner's arrival", lambda: self._client.hset(self._keys.state, "term", self._term))

    def _superseded(self) -> BufferUnavailable:
        return BufferUnavailable(f"another learner has taken over run {self._run_id}: end this one")

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        return patiently(self._address, what, call)
