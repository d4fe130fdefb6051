"""The embedded server over its whole life: killed, started again on a damaged file, kept small, outlived by nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from killing import kill_server, process_of

from counterflow.buffer.connection import connect
from counterflow.buffer.server import EmbeddedServer
from counterflow.errors import BufferUnavailable

_VALUE = b"x" * 33_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "buffer", timeout_s=60) as server:
        yield server


def wait_until(true: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stored_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.*"):
        with suppress(FileNotFoundError):  # The server removes what it has rewritten.
            total += path.stat().st_size
    return total


def test_killed_server_comes_back_elsewhere_or_empty(server: EmbeddedServer) -> None:
    before = server.address
    with connect(before) as client:
        for n in range(100):
            client.xadd("stream", {"n": n})
    for _ in range(2):
        kill_server(before, synced=True)
        assert server.revive() is True
        assert server.address == before
        with connect(before) as client:
            assert client.xlen("stream") == 100


def test_living_server_is_started_a_second_time(server: EmbeddedServer) -> None:
    assert server.revive() is False
    process = process_of(server.address)
    process.suspend()
    try:
        assert server.revive() is False
    finally:
        process.resume()
    assert process_of(server.address) == process


def test_truncated_file_and_left_socket_keep_the_server_down(server: EmbeddedServer, tmp_path: Path) -> None:
    with connect(server.address) as client, client.pipeline(transaction=True) as pipeline:
        client.xadd("stream", {"value": "whole"})
        pipeline.xadd("stream", {"value": "torn"}).incr("torn").execute()
    kill_server(server.address, synced=True)
    assert Path(server.address.url.removeprefix("unix://")).exists()
    (log,) = (tmp_path / "buffer" / "appendonlydir").glob("*.incr.aof")
    os.truncate(log, log.read_bytes().rindex(b"torn") + 2)
    assert server.revive() is True
    with connect(server.address) as client:
        assert [entry[b"value"] for _, entry in client.xrange("stream")] == [b"whole"]
        assert client.get("torn") is None


def test_damaged_file_is_served_as_if_nothing_was_lost(server: EmbeddedServer, tmp_path: Path) -> None:
    with connect(server.address) as client:
        for n in range(100):
            client.xadd("stream", {"n": n})
    kill_server(server.address, synced=True)
    (log,) = (tmp_path / "buffer" / "appendonlydir").glob("*.incr.aof")
    content = bytearray(log.read_bytes())
    start = content.index(b"*5\r\n", len(content) // 2)  # The log has no checksums: damage inside a value goes unseen.
    content[start : start + 64] = b"?" * 64
    log.write_bytes(content)
    with pytest.raises(BufferUnavailable, match=f"did not start in {tmp_path / 'buffer'}.*Bad file format"):
        server.revive()


def test_disk_fills_with_groups_that_were_trained(tmp_path: Path) -> None:
    rewrite_bytes, folder, largest = 16 << 20, tmp_path / "buffer", 0
    with EmbeddedServer(folder, 60, rewrite_bytes) as server, connect(server.address) as client:
        for _ in range(60):
            with client.pipeline(transaction=True) as pipeline:
                for _ in range(120):
                    pipeline.xadd("stream", {"payload": _VALUE})
                pipeline.xtrim("stream", maxlen=0)
                pipeline.execute()
            largest = max(largest, stored_bytes(folder))
            # What is written meanwhile is kept, and the next rewriting begins at twice that.
            wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
        wait_until(lambda: stored_bytes(folder) < 2 * rewrite_bytes)
    assert largest > rewrite_bytes


_PARENT = """
import sys, time
from pathlib import Path
import psutil
from counterflow.buffer.connection import connect
from counterflow.buffer.server import EmbeddedServer

with EmbeddedServer(Path(sys.argv[1]), 60) as server:
    def process():
        with connect(server.address) as client:
            return psutil.Process(int(client.info("server")["process_id"]))
    process().kill()
    while not server.revive():
        time.sleep(0.01)
    print(process().pid, server.address.url.removeprefix("unix://"), flush=True)
    time.sleep(60)
"""


def test_revived_server_outlives_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "buffer")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, socket = parent.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(int(pid)))
    wait_until(lambda: not Path(socket).parent.exists())


def test_server_leaves_its_socket_or_guard_behind(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with EmbeddedServer(tmp_path / "buffer", timeout_s=60) as server:
        socket = Path(server.address.url.removeprefix("unix://"))
        assert set(psutil.Process().children(recursive=True)) - before
    assert not socket.parent.exists()
    wait_until(lambda: not set(psutil.Process().children(recursive=True)) - before)


def test_two_servers_write_one_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterflow.buffer.server._ENDING_S", 0.0)
    with EmbeddedServer(tmp_path, timeout_s=20) as first:
        second = EmbeddedServer(tmp_path, timeout_s=0.2)
        with pytest.raises(BufferUnavailable, match="another server holds these data.*end the run that it belongs to"):
            second.__enter__()
        with connect(first.address) as client:
            assert client.ping()
    with EmbeddedServer(tmp_path, timeout_s=20) as third, connect(third.address) as client:
        assert client.ping()
