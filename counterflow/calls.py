"""Calls of Ray actors, each under a deadline; what comes of them in our own errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Any

from counterflow.errors import (
    BufferUnavailable,
    ConfigError,
    CounterflowError,
    DeadlineExceeded,
    ProcessDied,
    RunFailed,
    UnavailableError,
    WeightSyncError,
)

# Ray's words where its monitor of memory has killed a worker.
_FULL_MEMORY = re.compile(r"Memory on the node .*? was ([\d.]+)GB used / ([\d.]+)GB limit")
_OWN_WORDS = re.compile(r"counterflow\.errors\.(\w+): (.*)")
_TOLD_BY_TEXT = (ConfigError, UnavailableError, BufferUnavailable, WeightSyncError)


async def call(answer: Awaitable[Any], reason: str, timeout_s: float) -> Any:
    """Await a Ray call under a deadline, with the callee's own error where it raised one of ours.

    Raises:
        DeadlineExceeded: no answer in time.
        ConfigError, UnavailableError, WeightSyncError: the process could not begin, and said why.
        ProcessDied: the process died.
        RunFailed: it raised an error that is not ours.
    """
    import ray

    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, CounterflowError):
            raise cause from error
        raise RunFailed(f"while waiting for {reason}: {type(cause).__name__}: {cause}") from error
    except ray.exceptions.RayError as error:
        why = _why(error)
        # Of an actor whose construction failed Ray tells only the text.
        if found := _OWN_WORDS.match(why):
            for kind in _TOLD_BY_TEXT:
                if kind.__name__ == found[1]:
                    raise kind(found[2]) from error
        raise ProcessDied(f"while waiting for {reason}: its process died ({why})") from error
    except TimeoutError as error:
        raise DeadlineExceeded("the supervisor", reason, timeout_s) from error


def as_failure(group: BaseExceptionGroup[Any]) -> CounterflowError:
    """The first error of a group, as one that says that the run failed."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, CounterflowError) and not isinstance(error, UnavailableError):
        return error
    failure = RunFailed(str(error) if isinstance(error, CounterflowError) else f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _why(error: BaseException) -> str:
    """What a Ray error says of its cause: the last line, where it is no advice on Ray's settings."""
    if memory := _FULL_MEMORY.search(str(error)):
        used, limit = memory.groups()
        return (
            f"Ray killed it, since its node's memory was full, by this run or by others: {used} of {limit} GB; give "
            "this run more room, or fewer actors or ranks"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
