"""Rewards: what a response is worth, computed in processes of their own so that a bad sample costs only itself.

Flows in: a group's completions and its prompt's record. Flows out: a float a sample, or None where it failed. This
module is what a reward process imports: it must never import torch, transformers, vLLM or Ray.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import logging
import math
import os
import re
import signal
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, get_args

from pebble import ProcessExpired, ProcessPool

from counterflow.actors.named import import_named
from counterflow.actors.reward_process import (
    OUT_OF_MEMORY,
    PATIENCE_S,
    Failure,
    RewardFunction,
    Scored,
    describe,
    score,
    start_process,
)
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, RunFailed

__all__ = ["RewardFunction", "RewardPool", "exact", "last_number", "math_verify", "resolve_rewards"]


START_DEADLINE_S = 60.0
CLOSED = "the reward pool is closed: no reward for this group"
WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = {word: str(number) for number, word in enumerate(WORDS.split())} | {"once": "1", "twice": "2"}
ENVIRONMENT = "environment"
"""The name of what an environment gives, and of the reward that adds nothing to it."""
NONE = -1
"""Index of the sample being scored before any is."""


def exact(completion: str, record: dict[str, Any]) -> float:
    """1.0 where the response is the answer, but for blanks around either."""
    return float(completion.strip() == str(record["answer"]).strip())


def last_number(completion: str, record: dict[str, Any]) -> float:
    """1.0 where the response's last number, in digits or as a word up to twelve, is the answer; the rest is not read.

    For models too small to keep to a format. Set `reward.name: counterflow.actors.rewards:last_number`.
    """
    found = re.findall(rf"\d+(?:[.,]\d+)*|\b(?:{'|'.join(NUMBER_WORDS)})\b", completion.lower())
    return float(bool(found) and NUMBER_WORDS.get(found[-1], found[-1]) == str(record["answer"]).strip())


def nothing(completion: str, record: dict[str, Any]) -> float:
    """0.0: the environment's rewards are all there is."""
    return 0.0


def math_verify(completion: str, record: dict[str, Any]) -> float:
    """1.0 where the response's last mathematical expression equals the answer."""
    from math_verify import parse, verify

    # Its own deadlines need SIGALRM and are off: the pool has deadlines. It warns of that once a process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = str(record["answer"]).strip()
    if completion.strip() == answer:
        return 1.0
    expected = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"math_verify cannot parse the answer {answer!r}")
    return float(verify(expected, parse(completion, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(config: RunConfig, key: str) -> RewardFunction:
    """The task's own score of the last `<answer>` in the response, or of the whole response without one."""
    from reasoning_gym.utils import extract_answer

    from counterflow.actors.tasks import reasoning_gym_dataset

    if config.task.kind != "reasoning_gym":
        raise ConfigError(f"{key} = reasoning_gym needs task.kind = reasoning_gym, not {config.task.kind}")
    dataset = reasoning_gym_dataset(config, config.run.seed, config.task.size)

    def score(completion: str, record: dict[str, Any]) -> float:
        answer = extract_answer(completion)
        return float(dataset.score_answer(completion.strip() if answer is None else answer, record))

    return score


def resolve_rewards(config: RunConfig) -> dict[str, tuple[RewardFunction, float]]:
    """The functions that `reward.name` or `reward.parts` name, each with its weight.

    Raises:
        ConfigError: one is not there, cannot be imported, or does not fit the task.
    """
    if config.reward.parts is None:
        return {config.reward.name: (resolve_reward(config, config.reward.name, "reward.name"), 1.0)}
    parts = config.reward.parts.items()
    return {name: (resolve_reward(config, name, "reward.parts"), weight) for name, weight in parts}


def resolve_reward(config: RunConfig, name: str, key: str) -> RewardFunction:
    """The function that the configuration names at this key."""
    if name == "reasoning_gym":
        return reasoning_gym(config, key)
    if name == ENVIRONMENT and config.task.environment is None:
        raise ConfigError(f"{key} = environment: task.environment names none that would give a reward")
    if name in (built_in := {"exact": exact, "math_verify": math_verify, ENVIRONMENT: nothing}):
        if name == "math_verify":
            importlib.import_module(name)
        return built_in[name]
    if not all(name.partition(":")):
        close = difflib.get_close_matches(name, [*built_in, "reasoning_gym"], n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{key} = {name}: no such reward; {hint}"
            "It is exact, math_verify, reasoning_gym, environment, or your own as package.module:function"
        )
    function: RewardFunction = import_named(key, name)
    return function


class RewardPool:
    """Reward processes with a deadline a sample; made inside a rollout actor.

    `failures` counts failed samples by reason, `last_error` describes the latest.
    """

    def __init__(self, config: RunConfig) -> None:
        self.failures: dict[str, int] = dict.fromkeys(get_args(Failure), 0)
        self.last_error: str | None = None
        self.closed = False
        self.workers = [Worker(config) for _ in range(config.reward.workers)]
        self.free: asyncio.Queue[Worker] = asyncio.Queue()
        for worker in self.workers:
            self.free.put_nowait(worker)

    async def score(
        self, completions: list[str], record: dict[str, Any], deadline_s: float | None = None
    ) -> list[float | None]:
        """Rewards of one prompt's completions; None where a sample failed. See `score_parts`."""
        return [sample.reward for sample in await self.score_parts(completions, record, deadline_s)]

    async def score_parts(
        self, completions: list[str], record: dict[str, Any], deadline_s: float | None = None
    ) -> list[Scored]:
        """Rewards of one prompt's completions with their parts, or why there is none.

        A process scores them one after the other. One that hangs or kills its process costs itself alone: the others
        go on in a fresh process, where cheap ones before it may be scored once more.

        Args:
            deadline_s: start no sample later than this many seconds from now; those left fail as `not_started`.
                Calls made together share the bound: all of them end within `deadline_s` and one `reward.timeout_s`.

        Raises:
            RunFailed: the pool is closed, or was closed meanwhile.
        """
        until = math.inf if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        scored: dict[int, Scored] = {}
        while left := [index for index in range(len(completions)) if index not in scored]:
            outcome = await self.attempt([completions[index] for index in left], record, until)
            scored.update((left[position], sample) for position, sample in outcome.items())
        for index, sample in scored.items():
            if sample.failure is not None:
                self.note(sample.failure, f"{sample.message} (response {completions[index][:80]!r})")
        return [scored[index] for index in range(len(completions))]

    def note(self, failure: Failure, message: str) -> None:
        """Count a sample without a reward."""
        self.failures[failure] += 1
        self.last_error = f"{failure}: {message}"

    async def attempt(self, completions: list[str], record: dict[str, Any], until: float) -> dict[int, Scored]:
        """One task for one worker: scores by position, at least one, of a prefix or of the sample that failed."""
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                worker = await self.free.get()
        except TimeoutError:
            late = Scored(None, "not_started", "its turn did not come before the deadline of all samples together")
            return dict.fromkeys(range(len(completions)), late)
        try:
            if self.closed:
                raise RunFailed(CLOSED)
            outcome = await worker.run(completions, record)
            if self.closed:
                raise RunFailed(CLOSED)
            return outcome
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.closed and not (task and task.cancelling()):
                raise RunFailed(CLOSED) from None
            raise
        finally:
            self.free.put_nowait(worker)

    def close(self) -> None:
        """Kill the processes. Whoever waits for a score gets RunFailed."""
        self.closed = True
        for worker in self.workers:
            worker.pool.stop()
        for worker in self.workers:
            worker.close()


class Worker:
    """One reward process, replaced when it dies. Runs one task at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.closed = False
        self.future: Any = None
        self.context = get_context("spawn")
        self.current = self.context.RawValue("i", NONE)
        self.start()

    def start(self) -> None:
        # One process a pool: pebble gives up a pool when a process dies between tasks, and a lock held at its death
        # would stop its siblings.
        self.pool = ProcessPool(
            max_workers=1,
            initializer=start_process,
            initargs=(resolve_rewards, self.config, os.getpid(), self.current),
            context=self.context,
        )
        # Threads and processes inherit the mask: Ctrl-C reaches no reward process, not even one that still imports.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            assert self.pool.active  # asking starts it
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    async def restart(self) -> None:
        await asyncio.to_thread(stop, self.pool)
        if not self.closed:
            self.start()

    async def run(self, completions: list[str], record: dict[str, Any]) -> dict[int, Scored]:
        """Scores by position: of a prefix, or why the sample under way, or before any began every one, has none."""
        self.current.value = NONE
        outcome = await self.outcome(completions, record)
        if not isinstance(outcome, Scored):
            return dict(enumerate(outcome))
        position = self.current.value
        return {position: outcome} if position != NONE else dict.fromkeys(range(len(completions)), outcome)

    async def outcome(self, completions: list[str], record: dict[str, Any]) -> list[Scored] | Scored:
        timeout_s = self.config.reward.timeout_s
        # Whichever sample hangs began within PATIENCE_S, so each has its whole deadline.
        deadline_s = timeout_s + PATIENCE_S
        try:
            if not self.pool.active:
                await self.restart()
            self.future = self.pool.schedule(score, args=(completions, record), timeout=deadline_s)
            # pebble counts its deadline from the task's start and does not bound the start itself.
            async with asyncio.timeout(START_DEADLINE_S + deadline_s):
                scored: list[Scored] = await asyncio.wrap_future(self.future)
                return scored
        except TimeoutError:
            if not self.future.cancelled():
                return Scored(None, "timeout", f"no reward after reward.timeout_s = {timeout_s:g} s")
            await self.restart()
            return Scored(None, "crashed", f"the reward process did not answer within {START_DEADLINE_S:g} s")
        except ProcessExpired as error:
            if error.exitcode == OUT_OF_MEMORY:
                limit = self.config.reward.memory_bytes
                return Scored(None, "crashed", f"the reward ran out of reward.memory_bytes = {limit}")
            return Scored(
                None,
                "crashed",
                f"the reward process died with exit code {error.exitcode}: it was killed, or its code crashed, as some "
                "does that finds no room in reward.memory_bytes",
            )
        except BrokenProcessPool:
            await self.restart()
            return Scored(None, "crashed", "the reward process died")
        except Exception as error:  # the record or a completion could not be sent
            return Scored(None, "raised", describe(error))

    def close(self) -> None:
        self.closed = True
        if self.future is not None:
            self.future.cancel()
        stop(self.pool)


def stop(pool: Any) -> None:
    pool.stop()
    pool.join()
