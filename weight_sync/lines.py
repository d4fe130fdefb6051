"""Lines: a TCP connection from each receiver to the sender, to say how far it is and to learn that it is over.

Weights never pass here. A line ends with its process, so that a death is known at once whatever carries the weights;
and no end waits for the other's answer without a deadline.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from counterflow.errors import WeightSyncError

_MOST_BYTES = 1 << 16


class State(StrEnum):
    """What a receiver last said of itself, or what the sender found."""

    JOINED = "joined"
    """It belongs to the group and has nothing of a version."""
    RECEIVING = "receiving"
    """It has loaded so many buckets of a version."""
    HOLDS = "holds"
    """It has loaded a version."""
    REFUSED = "refused"
    """It gave a version up for a reason of its own."""
    GAVE_UP = "gave up"
    """It gave a version up because of the others."""
    LEFT = "left"
    """It closed its line."""
    LOST = "lost"
    """Its line ended without a word: the process, or its host, died."""


_OWN_ACCOUNT = (State.REFUSED, State.LEFT, State.LOST)


@dataclass(frozen=True)
class Report:
    """What a receiver says."""

    state: State
    version: int = -1
    buckets: int = 0
    reason: str = ""


class _Connection:
    """One end of a line: JSON values, one a text line."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        connected.settimeout(timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._unread = b""

    def say(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError when the other end is gone."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> list[dict[str, Any]]:
        """What has come, where the socket is known to be readable.

        Raises:
            EOFError: the other end is gone.
            ValueError: these are no messages.
        """
        try:
            data = self.socket.recv(_MOST_BYTES)
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not data:
            raise EOFError
        if len(self._unread) > _MOST_BYTES or not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a line of ours")
        return messages

    def close(self) -> None:
        self.socket.close()


class Lines:
    """The sender's ends.

    Args:
        host: address to listen on; a free port is taken.
        names: the receivers that are expected.
        generation: the group's number; who calls for another one is turned away.
        plan: fingerprint of the plan that every receiver must have.
        timeout_s: longest wait for a receiver's socket to take a word, in seconds.
    """

    def __init__(self, host: str, names: Sequence[str], generation: int, plan: str, timeout_s: float) -> None:
        self.reports: dict[str, Report] = {}
        self._names, self._timeout_s = tuple(names), timeout_s
        self._generation, self._plan = generation, plan
        self._server = socket.create_server((host, 0), family=family_of(host))
        self.host, self.port = self._server.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._connections: dict[str, _Connection] = {}

    @property
    def missing(self) -> list[str]:
        """Receivers that never called."""
        return [name for name in self._names if name not in self.reports]

    def gather(self, timeout_s: float) -> None:
        """Return when every receiver has called.

        Raises:
            WeightSyncError: some did not within `timeout_s`, or one is gone again; names them.
        """
        deadline = time.monotonic() + timeout_s
        while self.missing and not self.gone:
            if (left := deadline - time.monotonic()) <= 0:
                absent = ", ".join(self.missing)
                raise WeightSyncError(f"no call from {absent} within {timeout_s:g} s", self.missing)
            self.listen(left)
        if self.gone:
            raise WeightSyncError(f"{describe(self.reports, self.gone)}", self.at_fault)
        self._selector.unregister(self._server)
        self._server.close()

    @property
    def gone(self) -> list[str]:
        """Receivers that take no further part, whatever the reason."""
        return [name for name, report in self.reports.items() if report.state in (*_OWN_ACCOUNT, State.GAVE_UP)]

    @property
    def at_fault(self) -> list[str]:
        """Receivers that are gone on their own account."""
        return [name for name, report in self.reports.items() if report.state in _OWN_ACCOUNT]

    def listen(self, pause_s: float) -> None:
        """Take in what the receivers say: at once what is there, else the first word within `pause_s`."""
        for key, _ in self._selector.select(max(pause_s, 0)):
            if key.fileobj is self._server:
                self._answer()
            else:
                self._hear(key.data)

    def tell(self, word: str) -> None:
        """Say a word to every receiver that still listens."""
        for connection in self._connections.values():
            # Who is dead or stuck is found by its silence.
            with suppress(OSError):
                connection.say({"word": word})

    def close(self) -> None:
        """Hang up."""
        self._selector.close()
        self._server.close()
        for connection in self._connections.values():
            connection.close()

    def _answer(self) -> None:
        accepted, _ = self._server.accept()
        connection = _Connection(accepted, self._timeout_s)
        try:
            # Its first words come with the call; a stranger that says nothing must not hold up the others.
            accepted.settimeout(1)
            hello = connection.heard()[0]
            accepted.settimeout(self._timeout_s)
            name, generation, plan = str(hello["name"]), hello["generation"], hello["plan"]
        except (EOFError, ValueError, LookupError):
            connection.close()
            return
        if generation != self._generation or name not in self.missing:
            self._turn_away(connection, f"generation {self._generation} does not expect it, or heard from it already")
            return
        if plan != self._plan:
            reason = "its model has other tensors, or it was told another bucket size"
            self.reports[name] = Report(State.REFUSED, reason=reason)
            self._turn_away(connection, reason)
            return
        self._connections[name] = connection
        self._selector.register(accepted, selectors.EVENT_READ, name)
        self.reports[name] = Report(State.JOINED)

    def _turn_away(self, connection: _Connection, reason: str) -> None:
        with suppress(OSError):
            connection.say({"word": reason})
        connection.close()

    def _hear(self, name: str) -> None:
        connection = self._connections[name]
        try:
            for message in connection.heard():
                self.reports[name] = Report(**{**message, "state": State(message["state"])})
        except (EOFError, ValueError, TypeError, LookupError):
            self._selector.unregister(connection.socket)
            if name not in self.gone:
                self.reports[name] = Report(State.LOST, self.reports[name].version, self.reports[name].buckets)


class Line:
    """A receiver's end. Opening it returns when the sender has heard from every receiver.

    Raises:
        WeightSyncError: the sender cannot be reached, refuses, or is not ready within `timeout_s`.
    """

    def __init__(self, host: str, port: int, name: str, generation: int, plan: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            self._connection = _Connection(socket.create_connection((host, port), timeout_s), timeout_s)
        except OSError as error:
            raise WeightSyncError(f"{name} cannot reach the sender at {host}:{port}: {error}") from error
        self.host = str(self._connection.socket.getsockname()[0])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._connection.socket, selectors.EVENT_READ)
        try:
            with _as_loss():
                self._connection.say({"name": name, "generation": generation, "plan": plan})
            while not (words := self._words(deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"{name} waited {timeout_s:g} s for the sender and the other receivers")
            if words[0] != "go":
                raise WeightSyncError(f"the sender refuses {name}: {words[0]}")
        except BaseException as error:
            self.report(Report(State.GAVE_UP, reason=str(error)))
            self.close()
            raise

    def report(self, report: Report) -> None:
        """Tell the sender. A sender that is gone is found by listening."""
        with suppress(OSError):
            self._connection.say(asdict(report))

    def listen(self, pause_s: float) -> None:
        """Wait `pause_s` for a word from the sender, which speaks only to end it.

        Raises:
            WeightSyncError: it did, or it is gone.
        """
        for word in self._words(pause_s):
            raise WeightSyncError(f"the sender gave up: {word}")

    def close(self) -> None:
        """Hang up."""
        self._selector.close()
        self._connection.close()

    def _words(self, pause_s: float) -> list[str]:
        with _as_loss():
            ready = self._selector.select(max(pause_s, 0))
            return [str(message["word"]) for message in self._connection.heard()] if ready else []


def describe(reports: dict[str, Report], names: Sequence[str]) -> str:
    """What became of these receivers, in words."""
    return "; ".join(f"{name} {_describe(reports[name])}" for name in names)


def _describe(report: Report) -> str:
    done = f"{report.buckets} bucket{'' if report.buckets == 1 else 's'} of version {report.version}"
    place = f" (it had loaded {done})" if report.buckets else ""
    match report.state:
        case State.LOST:
            return f"died{place}"
        case State.LEFT:
            return f"left{place}"
        case State.REFUSED | State.GAVE_UP:
            return f"{report.state}: {report.reason}"
        case _:
            return f"said no more{place}"


@contextmanager
def _as_loss() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, ValueError, LookupError) as error:
        raise WeightSyncError("the sender is gone: its process or its host died, or it closed the group") from error


def family_of(host: str) -> socket.AddressFamily:
    """IPv4 or IPv6, for an address or a name. Raises OSError or UnicodeError where it is none."""
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
