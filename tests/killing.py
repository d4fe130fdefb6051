"""kill -9 of a real server."""

from __future__ import annotations

import os

import psutil

from counterflow.buffer.connection import Address, connect


def process_of(address: Address) -> psutil.Process:
    with connect(address) as client:
        return psutil.Process(int(client.info("server")["process_id"]))


def kill_server(address: Address, *, synced: bool = False) -> None:
    """Return when the process, our child, is gone but not yet buried; `synced`: let it bring its log to disk first."""
    process = process_of(address)
    if synced:
        with connect(address) as client:
            client.set("last", "write")  # WAITAOF waits for what its own connection wrote.
            assert client.execute_command("WAITAOF", 1, 0, 60_000)[0] == 1
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
