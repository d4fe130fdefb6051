"""The learner's side of the buffer: batches of whole groups, each group trained exactly as often as it was asked for.

A step's groups are archived and synced to disk before the server is told, so that whatever dies in between, the archive
knows what was trained. A consumer that arrives takes over from the one before it, whose calls are refused from then on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from counterflow.buffer.ahead import Ahead
from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import from_batch, to_batch
from counterflow.buffer.connection import Address, connect, patiently
from counterflow.buffer.reading import Reading, missing, next_freshest, next_in_admission_order, next_ready, stale
from counterflow.buffer.shelf import Entry, Shelf
from counterflow.buffer.standing import Row, Standing, read_heard, read_standing
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
        self._origin, self._schema, self._keys = origin, origin.schema(), Keys.of(origin.run_id)
        self._reading, self._tell, self._on_stale = reading or Reading(), tell, on_stale
        self._term = f"learner-{secrets.token_hex(8)}"
        self._arrive, self._commit, self._release = (
            self._client.register_script(script(name)) for name in ("arrive", "commit", "release")
        )
        self._shelf = Shelf(address, self._client, self._keys, origin, self._term)
        self._ahead = Ahead()
        # Sets are replaced, never changed: the thread that fetches ahead reads them.
        self._taken: frozenset[int] = frozenset()
        self._lost: frozenset[int] = frozenset()
        self._rows: dict[bytes, Row] = {}
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
            self.release_leases(0)

    def take(self, groups: int, timeout_s: float) -> list[Entry]:
        """The next `groups` groups, waiting until all are there. The batch after them is fetched while they are used.

        Raises:
            DeadlineExceeded: they are not there after `timeout_s` seconds; says what is missing.
        """
        self._ahead.end()
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
        self._ahead.begin(partial(self._fetch_ahead, groups), _LOOK_AGAIN_S)
        return taken

    def commit(self, entries: Sequence[Entry], version: int) -> None:
        """Record that the step which made `version` trained `entries`: in the archive, then on the server, once.

        Raises:
            BufferUnavailable: also when `version` does not follow, or a group was trained before.
        """
        if version != self.version + 1:
            raise BufferUnavailable(f"the commit of version {version} does not follow version {self.version}")
        self._check_heard()
        trained = [(e.group.admission, e.group.response_tokens) for e in entries]
        numbers = {n for n, _ in trained}
        if strangers := numbers - self._taken:
            raise BufferUnavailable(
                f"groups {sorted(strangers)} were not taken, or trained before: take each batch anew"
            )
        if self._archive is not None:
            batches = [to_batch(e.group, self._schema) for e in entries]
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

    def release_leases(self, known_lost: int = 0) -> None:
        """Give out again at once what is being generated: for when no actor lives, or the server forgot groups."""
        keys = [self._keys.state, self._keys.leases, self._keys.attempts]
        self._ask("the release of leases", lambda: self._release(keys=keys, args=[known_lost]))

    def ledger(self) -> Ledger:
        """Where every group of the run is now."""
        return ledger_by(self._client, self._address, self._origin.run_id)

    def close(self) -> None:
        """Stop fetching; close the connections and the archive."""
        self._ahead.end()
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

    def _fetch_ahead(self, groups: int) -> bool:
        """Fetch what is there of the next batch; True when it is all there, or something keeps it from being."""
        standing = read_standing(self._client, self._keys, self._rows)
        chosen = self._choose(groups, standing)
        here = {n: standing.buffered[n] for n in chosen if n in standing.buffered}
        return not self._shelf.fetch_ahead(here, self.version) or len(here) == groups

    def _check_standing(self) -> Standing:
        """How the run stands, the server knowing all it was told and this learner being the one that it hears."""
        standing = self._standing()
        if standing.server != self._server:
            self._ahead.end()
            standing = self._come_back()
        self._check_term(standing.term)
        self._known = frozenset(standing.buffered)
        return standing

    def _check_heard(self) -> None:
        """The same, without the reading of the directory where the server is the one of before."""
        server, term = self._ask("the state of the run", partial(read_heard, self._client, self._keys))
        if server == self._server:
            self._check_term(term)
        else:
            self._check_standing()

    def _check_term(self, term: str) -> None:
        if not term:
            raise BufferUnavailable(
                f"run {self._origin.run_id} was removed from the buffer at {self._address.shown}: end this learner, "
                "and see who else uses that server"
            )
        if term != self._term:
            raise self._superseded()

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
            self.release_leases(len(gone))
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
        term, server = self._ask("the learner's arrival", lambda: self._arrive(keys=[self._keys.state], args=args))
        return term.decode(), server.decode()

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
        keys = [k.state, k.leases, k.attempts, k.stream, k.buffered, k.uses, *(k.payload(n) for n, _ in trained)]
        args = [self._term, version, self._reading.uses, int(recovering), *numbers]
        self._ask(f"the commit of version {version}", lambda: self._commit(keys=keys, args=args))

    def _standing(self) -> Standing:
        found: Standing = self._ask(
            "the state of the run", partial(read_standing, self._client, self._keys, self._rows)
        )
        self._rows = {row.text: row for row in found.buffered.values()}
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
