"""What may go wrong in saying why a process of the run died."""

from __future__ import annotations

import asyncio

import pytest
import ray.exceptions

from counterflow.calls import call
from counterflow.errors import BufferUnavailable, ConfigError, CounterflowError, ProcessDied, WeightSyncError

# Of Ray 2.60, shortened.
OUT_OF_MEMORY = """The actor died unexpectedly before finishing this task.
1 worker(s) were killed due to the node running low. Memory on the node (IP: 192.0.2.2, ID: 21ec) was 22.77GB \
used / 23.54GB limit (0.967290)
OOM kill reason: Memory usage 24450000000B exceeded threshold of 24012190515B (95.0% of 25275990016B limit)
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io. Consider provisioning more \
memory on this node. To disable worker killing, set the environment variable `RAY_memory_monitor_refresh_ms` to zero."""


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (OUT_OF_MEMORY, r"was full, by this run or by others: 22\.77 of 23\.54 GB; give this run more room"),
        ("The actor died.\n\tpid: 7\nWorker exited with a SIGKILL.\n", r"died \(Worker exited with a SIGKILL\.\)"),
        ("", r"died \(RayError\)"),
    ],
    ids=["memory", "killed", "silent"],
)
def test_death_is_told_with_advice_on_rays_settings(said: str, words: str) -> None:
    async def dies() -> None:
        raise ray.exceptions.RayError(said)

    with pytest.raises(ProcessDied, match=words) as caught:
        asyncio.run(call(dies(), "actor 0 to start its engine", 5))
    assert "\n" not in str(caught.value) and "RAY_" not in str(caught.value)


@pytest.mark.parametrize("kind", [ConfigError, BufferUnavailable, WeightSyncError])
def test_reason_for_which_a_process_cannot_begin_is_taken_for_its_death(kind: type[CounterflowError]) -> None:
    async def refuses() -> None:
        raise ray.exceptions.RayError(f"The actor died.\n\x20 File x\ncounterflow.errors.{kind.__name__}: it is wrong")

    with pytest.raises(kind, match="^it is wrong$"):
        asyncio.run(call(refuses(), "the learner", 5))


def test_bug_in_a_constructor_is_taken_for_a_reason() -> None:
    async def fails() -> None:
        raise ray.exceptions.RayError("The actor died.\ncounterflow.errors.RunFailed: it failed")

    with pytest.raises(ProcessDied, match="it failed"):
        asyncio.run(call(fails(), "the learner", 5))
