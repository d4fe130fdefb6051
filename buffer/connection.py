"""Where the buffer's server is and how to reach it: an address that may cross processes, and clients made from it.

Comes in: an address, and the environment (see credentials). Goes out: clients that send each command once, and two ways
to use them: `asking` turns their errors into one of ours, `patiently` outlasts an outage by repeating a call. A user of
the server needs no more rights than `RIGHTS`. Nothing here knows what the run keeps under its keys.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.exceptions
from redis.backoff import EqualJitterBackoff, NoBackoff
from redis.retry import Retry

from counterflow.buffer.credentials import (
    CA_FILE_VARIABLE,
    CERTIFICATE_FILE_VARIABLE,
    KEY_FILE_VARIABLE,
    PASSWORD_FILE_VARIABLE,
    PASSWORD_VARIABLE,
    USERNAME_VARIABLE,
    login,
    tls_files,
)
from counterflow.errors import BufferUnavailable, first_line

T = TypeVar("T")

RIGHTS = (
    "~counterflow:* +@read +@write +@scripting +@transaction +@connection -@dangerous "
    "+time +info +config|get +cluster|slots"
)
"""The least rights of a user, as `ACL SETUSER` takes them. Without `config|get` a run works, less checked."""

CLIENT_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
"""Everything a client raises: RedisClusterException stands beside RedisError, not below it."""

_LOST = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.RedisClusterException, OSError)
_REFUSED_LOGIN = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)
_PASSING = (
    *_LOST,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
)
# Replies without a class of their own: a disk that is full or too slow, replicas that are away, a script that runs on.
_PASSING_WORDS = ("MISCONF ", "NOREPLICAS ", "BUSY ")


@dataclass(frozen=True)
class Address:
    """A server, the longest wait for an answer and for the end of an outage, in seconds. Holds no secret."""

    url: str
    timeout_s: float = 5.0
    outage_s: float = 30.0
    cluster: bool = False

    @property
    def shown(self) -> str:
        """The URL without user and password, fit for messages."""
        url = re.sub(r"(?<=[?&])(username|password)=[^&]*&?", "", self.url).rstrip("?&")
        # A path is no place for a secret, while a password may hold anything up to the last @.
        return url if url.startswith("unix:///") else re.sub(r"://.*@", "://", url)


def is_url(text: str) -> bool:
    """Whether a client can be made from it."""
    try:
        redis.ConnectionPool.from_url(text).make_connection()
    except (ValueError, TypeError):
        return False
    return True


def connect(address: Address) -> redis.Redis:
    """A blocking client that sends each command once. Only a cluster is asked something yet: where its slots are.

    Raises:
        BufferUnavailable: the environment is at fault, or the cluster does not answer.
    """
    options, once = _options(address), Retry(NoBackoff(), 0)
    if not address.cluster:
        return redis.Redis.from_url(address.url, retry=once, health_check_interval=30, **options)
    return patiently(
        address,
        "the map of the cluster",
        lambda: redis.RedisCluster.from_url(address.url, retry=once, require_full_coverage=False, **options),
    )


def connect_async(address: Address) -> redis.asyncio.Redis:
    """An asyncio client that sends each command once. Nothing is sent yet.

    Raises:
        BufferUnavailable: the environment is at fault.
    """
    options, once = _options(address), redis.asyncio.retry.Retry(NoBackoff(), 0)
    if not address.cluster:
        return redis.asyncio.Redis.from_url(address.url, retry=once, health_check_interval=30, **options)
    return redis.asyncio.RedisCluster.from_url(address.url, retry=once, require_full_coverage=False, **options)


def _options(address: Address) -> dict[str, object]:
    return {
        "socket_connect_timeout": address.timeout_s,
        # Reads may block for a moment before they are answered.
        "socket_timeout": max(address.timeout_s, 1.0),
        **login(),
        **(tls_files() if urlsplit(address.url).scheme == "rediss" else {}),
    }


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
    except CLIENT_ERRORS as error:
        raise _unavailable(address, what, error) from error


def patiently(address: Address, what: str, call: Callable[[], T]) -> T:
    """What `call` returns, repeated while the server is away, loads, is full or moves, for `outage_s` seconds at most.

    Args:
        what: a noun, as for `asking`.
        call: safe to repeat, also after it was done and only its reply was lost.

    Raises:
        BufferUnavailable: it stayed so, and for how long; or at once where waiting does not help.
    """
    outage = _Outage(address, what)
    with asking(address, what):
        result: T = Retry(_backoff(), -1, CLIENT_ERRORS).call_with_retry(call, outage.bear)
    return result


async def patiently_async(address: Address, what: str, call: Callable[[], Awaitable[T]]) -> T:
    """As `patiently`, without blocking the event loop."""
    outage = _Outage(address, what)

    async def bear(error: Exception) -> None:
        outage.bear(error)

    with asking(address, what):
        result: T = await redis.asyncio.retry.Retry(_backoff(), -1, CLIENT_ERRORS).call_with_retry(call, bear)
    return result


def _backoff() -> EqualJitterBackoff:
    return EqualJitterBackoff(cap=1.0, base=0.02)


@dataclass
class _Outage:
    """The time a call has been tried."""

    address: Address
    what: str
    began: float = field(default_factory=time.monotonic)

    def bear(self, error: Exception) -> None:
        """Return where the call may be tried again, raise BufferUnavailable where it may not."""
        if not _passes(self.address, error):
            raise _unavailable(self.address, self.what, error) from error
        tried_s = time.monotonic() - self.began
        if tried_s >= self.address.outage_s:
            raise _unavailable(self.address, self.what, error, tried_s) from error


def _passes(address: Address, error: Exception) -> bool:
    # MovedError is one too: the slot is elsewhere, or, within a transaction, on its way there.
    if isinstance(error, redis.exceptions.AskError):
        return address.cluster
    return advice(error) is None and (isinstance(error, _PASSING) or _said(error).startswith(_PASSING_WORDS))


def _said(error: Exception) -> str:
    """The server's own words: of a transaction's error the client tells the command first, payload and all."""
    told = first_line(error)
    found = re.search(r"pipeline caused error: \(['\"](.*)['\"],\)$", told)
    return found[1] if found else told


def _unavailable(address: Address, what: str, error: Exception, tried_s: float | None = None) -> BufferUnavailable:
    lost = isinstance(error, _LOST) and not isinstance(error, _REFUSED_LOGIN)
    tried = "" if tried_s is None else f"; tried for {tried_s:.1f} s"
    mend = advice(error) or (
        f"see whether its server still runs and can be reached from here{hint_of_tls(address, error)}"
        if lost
        else "see the server's log, its memory and its disk"
    )
    return BufferUnavailable(
        f"the buffer at {address.shown} {'went away during' if lost else 'refused'} {what} "
        f"({_said(error).rstrip('.')}{tried}): {mend}"
    )


def advice(error: BaseException) -> str | None:
    """What to do about a login or a TLS connection that is refused, which waiting does not mend; None for the rest."""
    if isinstance(error, _REFUSED_LOGIN):
        return (
            f"set {USERNAME_VARIABLE} and {PASSWORD_VARIABLE} (or {PASSWORD_FILE_VARIABLE}) to a user with the rights "
            f"{RIGHTS}"
        )
    said = str(error).upper().replace("_", " ")
    if "MISMATCH, CERTIFICATE" in said:
        return "name the server in the URL as its certificate does"
    if "CERTIFICATE VERIFY FAILED" in said:
        return f"set {CA_FILE_VARIABLE} to the certificate of the authority that signed the server's"
    if "CERTIFICATE REQUIRED" in said or "HANDSHAKE FAILURE" in said:
        return f"set {CERTIFICATE_FILE_VARIABLE} and {KEY_FILE_VARIABLE} to a certificate that the server accepts"
    if "WRONG VERSION NUMBER" in said or "RECORD LAYER FAILURE" in said:
        return "this port does not speak TLS: use its TLS port, or redis:// instead of rediss://"
    return None


def hint_of_tls(address: Address, error: BaseException) -> str:
    """What else may keep a server silent, for the end of an advice; empty where the error does not look like it."""
    scheme, said = urlsplit(address.url).scheme, str(error).lower()
    if scheme == "rediss" and "timeout connecting" in said:
        return "; where this port does not speak TLS, use redis:// instead of rediss://"
    if scheme == "redis" and ("closed" in said or "reset" in said):
        return "; where this port speaks TLS, use rediss:// instead of redis://"
    return ""


def discover(address: Address) -> Address:
    """The address with what only the server knows: whether it is a node of a cluster.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """
    if urlsplit(address.url).scheme == "unix":
        return address
    with asking(address, "the question whether it is a cluster"), node(address) as client:
        return replace(address, cluster=bool(client.info("cluster").get("cluster_enabled")))


async def largest_value_bytes(address: Address, client: redis.asyncio.Redis) -> int:
    """The largest value that the server accepts, in bytes; 512 MiB, the servers' default, where it does not tell.

    Raises:
        BufferUnavailable: the server went away, or refuses.
    """

    async def ask() -> int:
        try:
            return int((await client.config_get("proto-max-bulk-len"))["proto-max-bulk-len"])
        except redis.ResponseError as error:
            if not is_secret(error):
                raise
            return 512 << 20

    return await patiently_async(address, "the question for its largest value", ask)


def is_secret(error: redis.ResponseError) -> bool:
    """Whether the user may not run CONFIG GET, or the server's owner took it away, as on managed servers."""
    return isinstance(error, redis.exceptions.NoPermissionError) or "unknown" in str(error).lower()


def node(address: Address) -> redis.Redis:
    """A client of the very node that the URL names."""
    return connect(replace(address, cluster=False))
