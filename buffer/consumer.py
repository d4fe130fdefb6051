"""The learner's side of the buffer: batches of whole groups, each group trained exactly as often as it was asked for.

A step's groups are archived and synced to disk before the server is told, so that whatever dies in between, the archive
knows what was trained. A consumer that arrives takes over from the one before it, whose calls are refused from then on.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import from_batch, read_batch
from counterflow.buffer.connection import CLIENT_ERRORS, Address, connect, patiently
from counterflow.buffer.reading import Reading, missing, next_freshest, next_in_admission_order, next_ready, stale
from counterflow.buffer.shelf import Entry, Shelf
from counterflow.buffer.standing import Standing, read_standing
from counterflow.buffer.store import Keys, ledger_by, script
from counterflow.buffer.trajectory import Group, Origin
from counterflow.errors import BufferUnavailable, DeadlineExceeded
from counterflow.records import Ledger

_LOOK_AGAIN_S = 0.02


class Consumer:
    """Takes batches of groups and commits the steps that trained them.

    Every method raises BufferUnavailable when the server stays away, or refuses.

    Args:
        archive: where a step's groups go before they leave the server. None keeps nothing: steps that the server
            itself forgets are an error then.
        tell: takes what the run's owner should know, a sentence at a time.
        on_stale: takes every group that is dropped as stale.
        version: the version to go on as, where the archive is empty and neither it nor the server knows of all before.
    """

    def __init__(
        self,
        address: Address,
        origin: Origin,
        archive: Archive | None = None,
        reading: Reading | None = None,
        tell: Callable[[str], None] = lambda _: None,
        on_stale: Callable[[Group], None] = lambda _: None,
        version: int | None = None,
    ) -> None:
        self._address, self._client, self._archive = address, connect(address), archive
        self._origin, self._keys = origin, Keys.of(origin.run_id)
        self._reading, self._tell, self._on_stale = reading or Reading(), tell, on_stale
        self._term = f"learner-{secrets.token_hex(8)}"
        self._arrive, self._commit, self._release = (
            self._client.register_script(script(name)) for name in ("arrive", "commit", "release")
        )
        self._shelf = Shelf(address, self._client, self._keys, origin, self._term)
        self._fetching: tuple[threading.Thread, threading.Event] | None = None
        # Sets are replaced, never changed: the thread that fetches ahead reads them.
        self._taken: frozenset[int] = frozenset()
        self._lost: frozenset[int] = frozenset()
        self._filtered = 0
        standing = self._standing()
        self._server = standing.server
        self._term_before, server_before = self._take_over()
        standing = self._standing()
        self._known = frozenset(standing.buffered)
        self.version = standing.version
        if archive is not None:
            self.version = 0 if archive.last_version is None else archive.last_version + 1
        if version is not None:
            self.version = version
            for lost in range(standing.version, version):
                self._commit_step(lost + 1, [], recovering=True)
        else:
            self._repeat_steps(standing.version)
        if server_before not in ("", self._server):
            self._release_leases(0)

    def take(self, groups: int, timeout_s: float) -> list[Entry]:
        """The next `groups` groups, waiting until all are there. The batch after them is fetched while they are used.

        Raises:
            DeadlineExceeded: they are not there after `timeout_s` seconds; says what is missing.
        """
        self._stop_fetching_ahead()
        deadline = time.monotonic() + timeout_s
        while True:
            standing = self._check_standing()
            self._shelf.keep(standing.buffered.keys())
            if self._drop_unwanted(standing):
                continue
            chosen = self._choose(groups, standing)
            if len(chosen) == groups and all(n in standing.buffered for n in chosen):
                entries = self._shelf.fetch({n: standing.buffered[n] for n in chosen}, self.version)
                if entries is None or self._drop_without_signal(entries, standing):
                    continue
                break
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the learner", missing(groups, chosen, standing, self._filtered), timeout_s)
            time.sleep(_LOOK_AGAIN_S)
        taken = self._shelf.take(chosen, self.version)
        self._taken |= set(chosen)
        self._filtered = 0
        self._fetch_ahead(groups)
        return taken

    def commit(self, entries: Sequence[Entry], version: int) -> None:
        """Record that the step which made `version` trained `entries`: in the archive, then on the server, once.

        Raises:
            BufferUnavailable: also when `version` does not follow, or a group was trained before.
        """
        if version != self.version + 1:
            raise BufferUnavailable(f"the commit of version {version} does not follow version {self.version}")
        self._check_standing()
        trained = [(e.group.admission, e.group.response_tokens) for e in entries]
        numbers = {n for n, _ in trained}
        if strangers := numbers - self._taken:
            raise BufferUnavailable(
                f"groups {sorted(strangers)} were not taken, or trained before: take each batch anew"
            )
        if self._archive is not None:
            batches = [read_batch(e.payload, self._origin) for e in entries]
            self._archive.append(self.version, batches, [e.passage for e in entries])
        self.version = version
        try:
            self._commit_step(version, trained, recovering=bool(self._lost & numbers))
        except BufferUnavailable:
            # The server may have been started again since it was last asked; coming back to it repeats the step.
            if self._archive is None or self._standing().server == self._server:
                raise
            self._check_standing()
        self._known -= numbers
        self._taken -= numbers
        self._lost -= numbers

    def release_leases(self) -> None:
        """Give out again at once what is being generated: for when no actor lives."""
        self._release_leases(0)

    def ledger(self) -> Ledger:
        """Where every group of the run is now."""
        return ledger_by(self._client, self._address, self._origin.run_id)

    def close(self) -> None:
        """Stop fetching; close the connections and the archive."""
        self._stop_fetching_ahead()
        self._client.close()
        if self._archive is not None:
            self._archive.close()

    def _choose(self, groups: int, standing: Standing) -> list[int]:
        """Admission numbers of the next batch; in admission order some may not be there yet."""
        buffered = {n: row for n, row in standing.buffered.items() if n not in self._taken}
        if self._reading.order == "ready":
            return next_ready(groups, buffered)
        if self._reading.order == "freshest":
            return next_freshest(groups, buffered)
        leased = standing.leases.keys() - self._taken
        return next_in_admission_order(groups, buffered.keys() | leased, standing.admitted)

    def _drop_unwanted(self, standing: Standing) -> bool:
        """Drop what is too old or nobody's; whether there was any."""
        if standing.strangers > 0:
            self._shelf.sweep()
        waiting = {n: row for n, row in standing.buffered.items() if n not in self._taken}
        late = stale(waiting, self.version, self._reading.max_lag)
        # Fetched to be counted; what cannot be read goes to quarantine, and the rest is met again.
        for entry in self._shelf.fetch({n: waiting[n] for n in late}, self.version) or []:
            n = entry.group.admission
            self._shelf.drop(n, waiting[n], "stale")
            self._on_stale(entry.group)
        return bool(late)

    def _drop_without_signal(self, entries: Sequence[Entry], standing: Standing) -> bool:
        """Drop those whose rewards are all equal, if that is asked for; whether there was any."""
        if not self._reading.drop_equal_rewards:
            return False
        flat = [e.group.admission for e in entries if len({t.reward for t in e.group.trajectories} - {None}) < 2]
        for n in flat:
            self._shelf.drop(n, standing.buffered[n], "filtered")
        self._filtered += len(flat)
        return bool(flat)

    def _fetch_ahead(self, groups: int) -> None:
        stop = threading.Event()

        def run() -> None:
            # Whatever goes wrong here will go wrong again, and be told, when the batch is taken.
            with suppress(*CLIENT_ERRORS):
                while True:
                    standing = read_standing(self._client, self._keys)
                    chosen = self._choose(groups, standing)
                    here = {n: standing.buffered[n] for n in chosen if n in standing.buffered}
                    sound = self._shelf.fetch_ahead(here, self.version)
                    if not sound or len(here) == groups or stop.wait(_LOOK_AGAIN_S):
                        return

        thread = threading.Thread(target=run, name="fetch ahead", daemon=True)
        self._fetching = thread, stop
        thread.start()

    def _stop_fetching_ahead(self) -> None:
        if self._fetching is not None:
            thread, stop = self._fetching
            stop.set()
            thread.join()
            self._fetching = None

    def _check_standing(self) -> Standing:
        """How the run stands, the server knowing all it was told and this learner being the one that it hears."""
        standing = self._standing()
        if standing.server != self._server:
            self._stop_fetching_ahead()
            standing = self._come_back()
        if not standing.term:
            raise BufferUnavailable(
                f"run {self._origin.run_id} was removed from the buffer at {self._address.shown}: end this learner, "
                "and see who else uses that server"
            )
        if standing.term != self._term:
            raise self._superseded()
        self._known = frozenset(standing.buffered)
        return standing

    def _come_back(self) -> Standing:
        """The server was started again, and may have lost the end of its log, this learner's doings included.

        It is told again what was trained; what it may have lost untrained is generated again at once.
        """
        while True:
            self._server = self._standing().server
            self._take_over(self._term_before)
            before = self._standing()
            try:
                repeated = self._repeat_steps(before.version)
            except BufferUnavailable:
                if self._standing().server != self._server:
                    continue
                raise
            gone = self._known - before.buffered.keys() - repeated - self._taken
            self._release_leases(len(gone))
            now = self._standing()
            if now.server == self._server:
                break
        self._lost = self._taken - now.buffered.keys()
        self._tell(
            f"the buffer's server was started again: it had lost {self.version - before.version} steps, which it was "
            f"told anew, and {len(gone)} groups, which are generated again"
        )
        return now

    def _take_over(self, *terms: str) -> tuple[str, str]:
        """Be the learner that is heard, following `terms` only if given; term and server's name of the one before."""
        args = [self._term, self._server, *terms]
        found = self._ask("the learner's arrival", lambda: self._arrive(keys=[self._keys.state], args=args))
        term, server = (text.decode() for text in found)
        return term, server

    def _release_leases(self, known_lost: int) -> None:
        keys = [self._keys.state, self._keys.leases, self._keys.attempts]
        self._ask("the release of leases", lambda: self._release(keys=keys, args=[known_lost]))

    def _repeat_steps(self, version: int) -> set[int]:
        """Tell the server the archived steps past `version`; returns the admission numbers that they trained."""
        if version > self.version or (version < self.version and self._archive is None):
            raise BufferUnavailable(
                f"the buffer at {self._address.shown} is at version {version} of run {self._origin.run_id}, its "
                f"archive at {self.version}: give the run its own server and its own folder; where the end of its "
                "archive was lost, resume with --lose-branch"
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
        keys = [k.state, k.leases, k.attempts, k.stream, k.buffered, k.uses]
        args = [self._term, version, self._reading.uses, int(recovering), *numbers]
        self._ask(f"the commit of version {version}", lambda: self._commit(keys=keys, args=args))

    def _standing(self) -> Standing:
        found: Standing = self._ask("the state of the run", lambda: read_standing(self._client, self._keys))
        return found

    def _superseded(self) -> BufferUnavailable:
        return BufferUnavailable(f"another learner has taken over run {self._origin.run_id}: end this one")

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return patiently(self._address, what, call)
        except BufferUnavailable as error:
            if "SUPERSEDED" in str(error.__cause__):
                raise self._superseded() from error
            raise
