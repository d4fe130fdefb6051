"""Every error Counterflow raises on purpose, as one tree. A message says what was wrong, where, and what to do.

CounterflowError
├── ConfigError          the configuration, or a file it names, cannot be used; nothing was started (exit code 2)
├── UnavailableError     something outside that the run needs is missing or refuses (exit code 2 before the start)
│   ├── BufferUnavailable    the Redis or Valkey server cannot be reached, or refuses the client
│   └── PlacementError       the cluster has no room for an actor or learner bundle
├── DeadlineExceeded     a wait passed its deadline; says who waited, on what, and for how long
├── EntryError           a stream entry is not a group this run can train (it goes to quarantine)
├── WeightSyncError      a policy version did not arrive where it had to
├── OutputError          what a command prints or writes finds no room or no way (exit code 1)
└── RunFailed            a part of the run died; says which and why (exit code 1)
    └── ProcessDied          one of its processes ended, or an engine below it
        └── LearnerDied          the learner's process ended
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BufferUnavailable",
    "ConfigError",
    "CounterflowError",
    "DeadlineExceeded",
    "EntryError",
    "LearnerDied",
    "OutputError",
    "PlacementError",
    "ProcessDied",
    "RunFailed",
    "UnavailableError",
    "WeightSyncError",
    "first_line",
]


class CounterflowError(Exception):
    """Base of every error below."""


class ConfigError(CounterflowError):
    """The configuration, or a file it names, cannot be used."""


class UnavailableError(CounterflowError):
    """Something outside this process that the run needs is missing or refuses."""


class BufferUnavailable(UnavailableError):
    """The Redis or Valkey server cannot be reached, or refuses the client."""


class PlacementError(UnavailableError):
    """The cluster has no room for an actor or learner bundle."""


class DeadlineExceeded(CounterflowError):
    """A wait passed its deadline.

    Args:
        owner: who waited.
        reason: what it waited for, and what to look at.
        timeout_s: how long it waited, in seconds.
    """

    def __init__(self, owner: str, reason: str, timeout_s: float) -> None:
        super().__init__(f"{owner} waited {timeout_s:g} s for {reason}")
        self.owner, self.reason, self.timeout_s = owner, reason, timeout_s

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, str, float]]:
        return type(self), (self.owner, self.reason, self.timeout_s)


class EntryError(CounterflowError):
    """A stream entry is not a group that this run can train."""


class WeightSyncError(CounterflowError):
    """A policy version did not arrive where it had to.

    Args:
        message: which version, where, and what to do.
        receivers: names of the receivers that kept it from arriving, where they are known.
    """

    def __init__(self, message: str, receivers: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.receivers = tuple(receivers)


class OutputError(CounterflowError, OSError):
    """What a command prints or writes finds no room or no way. An OSError too: the live view outlives it."""


class RunFailed(CounterflowError):
    """A part of the run died."""


class ProcessDied(RunFailed):
    """A process of the run ended, or one below it, that another may replace."""


class LearnerDied(ProcessDied):
    """The learner's process ended; the run may go on from what it left on the disk."""


def first_line(error: BaseException) -> str:
    """An error of anyone's in one line, or its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
