"""Where the buffer's server is and how to reach it: an address that may cross processes, and clients made from it.

Credentials come from the environment, never from a URL, a file or a command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.exceptions
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from counterflow.errors import BufferUnavailable

USERNAME_VARIABLE = "COUNTERFLOW_REDIS_USERNAME"
PASSWORD_VARIABLE = "COUNTERFLOW_REDIS_PASSWORD"

_OLDEST = {"redis": (7, 0), "valkey": (8, 0)}


@dataclass(frozen=True)
class Address:
    """A server and the longest wait for it, in seconds. Holds no secret."""

    url: str
    timeout_s: float = 5.0

    @property
    def shown(self) -> str:
        """The URL without user and password, fit for messages."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _options(address: Address) -> dict[str, object]:
    options: dict[str, object] = {
        "socket_connect_timeout": address.timeout_s,
        # Reads may block for a moment before they are answered.
        "socket_timeout": max(address.timeout_s, 1.0),
        "health_check_interval": 30,
    }
    if password := os.environ.get(PASSWORD_VARIABLE):
        options["password"] = password
        if username := os.environ.get(USERNAME_VARIABLE):
            options["username"] = username
    return options


def connect(address: Address, retries: int = 3) -> redis.Redis:
    """A blocking client. Nothing is sent yet."""
    retry = Retry(ExponentialBackoff(cap=0.5, base=0.02), retries=retries)
    return redis.Redis.from_url(address.url, retry=retry, **_options(address))


def connect_async(address: Address) -> redis.asyncio.Redis:
    """An asyncio client. Nothing is sent yet."""
    return redis.asyncio.Redis.from_url(address.url, **_options(address))


@contextmanager
def asking(address: Address, what: str) -> Iterator[None]:
    """Turn whatever a client raises inside into one error that says what was asked, where, and what to do.

    Args:
        what: a noun, as `the commit of version 3`.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise BufferUnavailable(
            f"the buffer at {address.shown} refused {what} ({_first_line(error)}): set {USERNAME_VARIABLE} and "
            f"{PASSWORD_VARIABLE} to a user that may write the keys counterflow:*"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise BufferUnavailable(
            f"the buffer at {address.shown} went away during {what} ({_first_line(error)}): see whether its server "
            "still runs and can be reached from here"
        ) from error
    except redis.RedisError as error:
        raise BufferUnavailable(
            f"the buffer at {address.shown} refused {what} ({_first_line(error)}): see the server's log, its memory "
            "and its disk"
        ) from error


def check_server(address: Address) -> list[str]:
    """Reach the server and see that it can hold a run; returns warnings.

    Raises:
        BufferUnavailable: not reachable, asks for a password, too old, or set to evict keys.
    """
    where = f"buffer.url {address.shown}"
    try:
        # Each retry of a command retries the connection too: a silent server would be waited for 16 times.
        client = connect(address, retries=0)
    except ValueError as error:
        raise BufferUnavailable(f"{where} is not a Redis URL: {error}") from error
    start = time.monotonic()
    try:
        server = client.info("server")
        settings = client.config_get("maxmemory-policy", "appendonly", "maxmemory")
    except redis.AuthenticationError as error:
        raise BufferUnavailable(f"{where} refuses the user or password: set {PASSWORD_VARIABLE} ({error})") from error
    except redis.exceptions.NoPermissionError as error:
        raise BufferUnavailable(f"{where}: the user may not run INFO and CONFIG GET ({error})") from error
    except redis.ResponseError as error:
        if "NOAUTH" in str(error) or "authentication" in str(error).lower():
            raise BufferUnavailable(f"{where} asks for a password: set {PASSWORD_VARIABLE}") from error
        raise BufferUnavailable(f"{where} answers with an error: {error}") from error
    except (redis.RedisError, OSError) as error:
        waited = time.monotonic() - start
        raise BufferUnavailable(
            f"{where} cannot be reached ({error}; tried for {waited:.1f} s): start the server, or leave buffer.url out "
            "for an embedded one"
        ) from error
    finally:
        client.close()
    name = "valkey" if "valkey_version" in server else "redis"
    version = str(server.get("valkey_version") or server.get("redis_version", "0"))
    if tuple(int(p) for p in version.split(".")[:2]) < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        raise BufferUnavailable(f"{where} is {name} {version}; this needs {name} {oldest} or newer")
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and int(settings.get("maxmemory", 0)):
        raise BufferUnavailable(
            f"{where} evicts keys (maxmemory-policy {policy}), which would lose groups: set maxmemory-policy noeviction"
        )
    if settings.get("appendonly") != "yes":
        return [f"{where} has no append-only file: a server that stops loses the buffered groups (set appendonly yes)"]
    return []


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".")
