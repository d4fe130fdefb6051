"""What runs inside a reward process: its bounds, and the scoring of one task's samples.

Flows in: completions and their record. Flows out: a `Scored` a sample; exceptions never cross the pipe as objects.
Beside the pipe, `current` says which sample is being scored, so that a hang or a death can be laid at its door.
"""

from __future__ import annotations

import copy
import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from counterflow.configs.schema import RunConfig

__all__ = [
    "OUT_OF_MEMORY",
    "PATIENCE_S",
    "Failure",
    "RewardFunction",
    "Scored",
    "describe",
    "score",
    "start_process",
    "zeroed",
]

RewardFunction = Callable[[str, dict[str, Any]], float]
Failure = Literal["raised", "timeout", "crashed", "not_finite", "not_started"]

OUT_OF_MEMORY = 97
"""Exit code of a process whose reward met its memory bound."""
PATIENCE_S = 0.1
"""A task starts no further sample after this many seconds: what a hang makes it lose was cheap."""
PR_SET_PDEATHSIG = 1

rewards: Mapping[str, tuple[RewardFunction, float]] | str = "the reward process was not started"
"""The parts of this process's reward with their weights, or why it has none."""
current: Any = None
"""Shared with the actor: index of the sample being scored."""


@dataclass(frozen=True)
class Scored:
    """A sample's reward, or why it has none."""

    reward: float | None
    failure: Failure | None = None
    message: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """What each part gave, before its weight; empty where one failed."""


def zeroed(sample: Scored) -> Scored:
    """The sample with a reward of 0, where it has one; its parts stay what they are."""
    return sample if sample.reward is None else replace(sample, reward=0.0)


def start_process(
    resolve: Callable[[RunConfig], Mapping[str, tuple[RewardFunction, float]]],
    config: RunConfig,
    parent: int,
    shared_index: Any,
) -> None:
    """Bound this process, then load its reward, so that a sample's deadline never pays for imports."""
    global rewards, current
    current = shared_index
    # pebble's handler runs only between bytecodes: a reward stuck in C would survive SIGTERM for seconds.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = config.reward.memory_bytes if hard == resource.RLIM_INFINITY else min(hard, config.reward.memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        rewards = resolve(config)
    except BaseException as error:
        rewards = f"the reward cannot be loaded: {describe(error)}"


def score(completions: list[str], record: dict[str, Any]) -> list[Scored]:
    """Score the first completion and as many of the others, in order, as begin within PATIENCE_S."""
    scored: list[Scored] = []
    began = time.monotonic()
    for index, completion in enumerate(completions):
        if index and time.monotonic() - began > PATIENCE_S:
            break
        current.value = index
        scored.append(score_one(completion, record))
    return scored


def score_one(completion: str, record: dict[str, Any]) -> Scored:
    """The weighted sum of all parts; one that fails costs the sample."""
    if isinstance(rewards, str):
        return Scored(None, "raised", rewards)
    parts: dict[str, float] = {}
    for name, (reward, _) in rewards.items():
        part = score_part(reward, completion, copy.deepcopy(record))
        if part.reward is None:
            return replace(part, message=f"{name}: {part.message}") if len(rewards) > 1 else part
        parts[name] = part.reward
    total = math.fsum(weight * parts[name] for name, (_, weight) in rewards.items())
    if not math.isfinite(total):
        return Scored(None, "not_finite", f"the weighted sum of the parts is {total}")
    return Scored(total, parts=parts)


def score_part(reward: RewardFunction, completion: str, record: dict[str, Any]) -> Scored:
    try:
        value: Any = reward(completion, record)
    except MemoryError:
        # What the sample allocated may live on in globals: only a fresh process is clean.
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:
        return Scored(None, "raised", describe(error))
    if isinstance(value, str | bytes):
        return Scored(None, "not_finite", f"the reward returned {str(value)[:80]!r}, not a number")
    try:
        number = float(value)
    except Exception:
        return Scored(None, "not_finite", f"the reward returned a {type(value).__name__}, not a number")
    if not math.isfinite(number):
        return Scored(None, "not_finite", f"the reward returned {number}")
    return Scored(number)


def describe(error: BaseException) -> str:
    """One line for an exception, even one that cannot print itself."""
    try:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    except Exception:
        return type(error).__name__
