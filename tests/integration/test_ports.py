"""Engines that start together take one port: vLLM finds a free one, lets go of it, and only then listens there.

Engines are stood for by the two things that they do with ports: eight of them would not fit on a small machine.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import pytest

from counterflow.cluster import Bundle, Cluster

ENGINES, TIMES = 8, 20


def start(environment: dict[str, str], barrier: Any, answer: Connection) -> None:
    """An engine's start, again and again, at the same moment as the others."""
    import torch.distributed as dist
    from vllm.utils.network_utils import get_open_port

    os.environ.update(environment)
    taken = []
    for _ in range(TIMES):
        barrier.wait(120)
        port = get_open_port()
        # All have found theirs before one listens: no race is tighter.
        barrier.wait(120)
        try:
            store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
        except Exception as error:
            taken.append(f"{port}: {error}")
        else:
            taken.append(str(port))
            barrier.wait(120)
            del store
            continue
        barrier.wait(120)
    answer.send(taken)


def together(environments: list[dict[str, str]]) -> list[list[str]]:
    """What each engine took, each time."""
    # Imported before the fork: eight imports of vLLM take a minute.
    import vllm.utils.network_utils  # noqa: F401

    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(environments))
    ends = []
    for environment in environments:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=start, args=(environment, barrier, theirs), daemon=True)
        process.start()
        ends.append((process, mine))
    found = []
    for process, mine in ends:
        assert mine.poll(300), "an engine did not start"
        found.append(mine.recv())
        process.join(60)
    return found


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.slow
def test_eight_engines_that_start_together_race_for_a_port() -> None:
    wanted = [Bundle("learner", 1, 0), *(Bundle(f"actor {i}", 1, 0) for i in range(ENGINES))]
    cluster = Cluster(None, wanted, None)
    taken = together([cluster.ports(index) for index in range(1, ENGINES + 1)])
    for ports in zip(*taken, strict=True):
        assert all(port.isdigit() for port in ports) and len(set(ports)) == ENGINES, ports
    # The test can see a race: here is one.
    raced = together([cluster.ports(1)] * 2)
    assert not all(port.isdigit() for ports in raced for port in ports)
