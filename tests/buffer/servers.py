"""What the tests of the connection share: keys and a script, servers behind proxies and TLS, and ways to use them."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from produce import fill

from counterflow.buffer.connection import Address, connect, connect_async, largest_value_bytes
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.store import forget, read_ledger
from counterflow.buffer.trajectory import Origin

COUNT = "redis.call('TIME') return redis.call('INCR', KEYS[1])"
COUNTER, STREAM = "counterflow:{run}:counter", "counterflow:{run}:stream"


async def use(address: Address) -> None:
    """Scripts, streams and transactions, by both kinds of client; a whole run is `live`."""
    blocking, other = connect(address), connect_async(address)
    try:
        count = blocking.register_script(COUNT)(keys=[COUNTER])
        assert await other.register_script(COUNT)(keys=[COUNTER]) == count + 1
        entry = await other.xadd(STREAM, {"payload": b"group"})
        blocking.xgroup_create(STREAM, "learner", id="0")
        assert len(blocking.xreadgroup("learner", "one", {STREAM: ">"}, count=9, block=50)[0][1]) == 1
        assert blocking.xreadgroup("learner", "one", {STREAM: ">"}, count=9, block=50) == []
        assert blocking.xpending(STREAM, "learner")["pending"] == 1
        _, claimed, *_ = blocking.xautoclaim(STREAM, "learner", "two", min_idle_time=0, start_id="0-0", count=9)
        assert claimed == [(entry, {b"payload": b"group"})]
        with blocking.pipeline(transaction=True) as pipeline:
            assert pipeline.xack(STREAM, "learner", entry).xlen(STREAM).get(COUNTER).execute()[:2] == [1, 1]
        assert await largest_value_bytes(address, other) == 512 << 20
        assert blocking.unlink(STREAM, COUNTER) == 2
    finally:
        blocking.close()
        await other.aclose()


def live(address: Address, origin: Origin, between: Callable[[], None]) -> None:
    """A short run: four groups, two steps, and something that happens between them."""
    fill(address, origin, [2, 0, 1, 3])
    consumer = Consumer(address, origin)
    consumer.commit(consumer.take(2, timeout_s=10), version=1)
    between()
    consumer.commit(consumer.take(2, timeout_s=10), version=2)
    ledger = read_ledger(address, origin.run_id)
    assert (ledger.trained, ledger.buffered, ledger.in_flight) == (4, 0, 0) and ledger.closes
    consumer.close()
    forget(address, origin.run_id)


@contextmanager
def in_front_of(port: int, context: ssl.SSLContext | None = None, hang_up_after: bytes = b"\0") -> Iterator[int]:
    """The port of a proxy: it speaks TLS, which the wheel's server cannot, and may hang up before a reply."""
    ports: list[int] = []
    started, ended = threading.Event(), asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while (chunk := await reader.read(1 << 16)) and hang_up_after not in chunk:
                writer.write(chunk)
                await writer.drain()
            writer.write(chunk)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        replies = asyncio.create_task(pump(behind_reader, writer))
        await pump(reader, behind_writer)
        replies.cancel()
        writer.close()

    async def main() -> None:
        proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        ports.append(proxy.sockets[0].getsockname()[1])
        started.set()
        await ended.wait()
        proxy.close()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # Handshakes that fail are the point of some tests.
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [taken.getsockname()[1] for taken in sockets]


def make_authority(folder: Path) -> None:
    """Fill a folder with a private authority, and certificates by it for 127.0.0.1 and for a client."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make certificates with")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        run(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        run("x509", "-req", "-in", f"{name}.csr", *signed_by, "-days", "2", "-out", f"{name}.pem")


def tls(authority: Path, *, client_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority / "ca.pem"))
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED if client_certificate else ssl.CERT_NONE
    return context
