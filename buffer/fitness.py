"""Whether the server that the user named is fit to hold a run.

Comes in: an address before the run starts. Goes out: an error where it would lose groups, warnings where it may.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import redis

from counterflow.buffer.connection import CLIENT_ERRORS, Address, advice, hint_of_tls, is_secret, node
from counterflow.buffer.credentials import CA_FILE_VARIABLE, CERTIFICATE_FILE_VARIABLE, KEY_FILE_VARIABLE, tls_files
from counterflow.errors import BufferUnavailable, first_line

_OLDEST = {"redis": (7, 0), "valkey": (8, 0)}
_SETTINGS = (
    "appendfsync",
    "appendonly",
    "auto-aof-rewrite-percentage",
    "maxmemory",
    "maxmemory-policy",
)


def check_server(address: Address) -> list[str]:
    """Reach the server and see that it can hold a run; returns warnings.

    Raises:
        BufferUnavailable: not reachable, asks for a password, too old, a replica, or set to evict keys.
    """
    where, start = f"buffer.url {address.shown}", time.monotonic()
    try:
        with node(address) as client:
            server = client.info("server", "replication", "cluster")
            settings = _settings(client)
    except ValueError as error:
        raise BufferUnavailable(f"{where} is not a Redis URL: {error}") from error
    except CLIENT_ERRORS as error:
        said, waited_s = first_line(error).rstrip("."), time.monotonic() - start
        if isinstance(error, redis.AuthenticationError | redis.ResponseError):
            mend = advice(error) or "see the server's log"
            raise BufferUnavailable(f"{where} refuses the connection ({said}): {mend}") from error
        mend = advice(error) or _advice_on_silence(address, said) + hint_of_tls(address, error)
        raise BufferUnavailable(f"{where} cannot be reached ({said}; tried for {waited_s:.1f} s): {mend}") from error
    _refuse_unfit(where, server, settings or {})
    return [f"{where} {warning}" for warning in _warnings(address, settings)]


def _advice_on_silence(address: Address, said: str) -> str:
    hung_up = "closed" in said or "reset" in said
    if hung_up and urlsplit(address.url).scheme == "rediss" and "ssl_certfile" not in tls_files():
        return f"where it asks for a client's certificate, set {CERTIFICATE_FILE_VARIABLE} and {KEY_FILE_VARIABLE}"
    return "start the server, or leave buffer.url out for an embedded one"


def _settings(client: redis.Redis) -> dict[str, str] | None:
    """What CONFIG GET tells; None where it tells us nothing."""
    try:
        settings: dict[str, str] = client.config_get(*_SETTINGS)
    except redis.ResponseError as error:
        if not is_secret(error):
            raise
        return None
    return settings


def _refuse_unfit(where: str, server: dict[str, object], settings: dict[str, str]) -> None:
    name = "valkey" if "valkey_version" in server else "redis"
    version = str(server.get("valkey_version") or server.get("redis_version", "0"))
    if tuple(int(p) for p in version.split(".")[:2]) < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        raise BufferUnavailable(f"{where} is {name} {version}; this needs {name} {oldest} or newer")
    if server.get("role") == "slave" and not server.get("cluster_enabled"):
        primary = f"{server.get('master_host')}:{server.get('master_port')}"
        raise BufferUnavailable(f"{where} is a replica, which takes no writes: name its primary, {primary}")
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and int(settings.get("maxmemory", 0)):
        raise BufferUnavailable(
            f"{where} evicts keys (maxmemory-policy {policy}), which would lose groups: set maxmemory-policy noeviction"
        )


def _warnings(address: Address, settings: dict[str, str] | None) -> Iterator[str]:
    if urlsplit(address.url).scheme != "rediss" and tls_files():
        yield f"is reached without TLS, though {CA_FILE_VARIABLE} or {CERTIFICATE_FILE_VARIABLE} is set (use rediss://)"
    if settings is None:
        yield "does not tell its settings (CONFIG GET): see that maxmemory-policy is noeviction and appendonly is yes"
    elif settings.get("appendonly") != "yes":
        yield "has no append-only file: a server that stops loses the buffered groups (set appendonly yes)"
    else:
        if settings.get("appendfsync") == "no":
            yield "does not see its file to the disk: a crash of its machine loses groups (set appendfsync everysec)"
        if settings.get("auto-aof-rewrite-percentage") == "0":
            yield "never rewrites its append-only file: its disk fills up (set auto-aof-rewrite-percentage 100)"
