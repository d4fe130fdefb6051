"""What the durable buffer costs: groups/s from one process to another, over bare Redis, Ray's Queue and TransferQueue.

The same groups go through each contender in turn, several times over, after a warm-up; sender and receiver are Ray
workers of their own. The clock runs from the first admission or put to the last group received and acknowledged.

- Counterflow: embedded server, append-only file synced with each write. Admission, encoding, addition; the receiver
  takes batches of 32, decoded and checked, and commits them, without an archive (the rivals have none).
- Bare Redis: the same server and settings, payloads encoded beforehand and never decoded; 32 at a time XADD in a
  pipeline, XREADGROUP, XACK and XDEL in a pipeline.
- Ray's Queue: dicts of four numpy arrays, a trajectory or a whole group each, one by one, and 16 at a time. Held in
  memory only.
- TransferQueue's SimpleStorage: the same arrays as tensors, 32 groups with each put and get. Held in memory only. It is
  no dependency of ours; where it is not installed its rows are left out. To have them:
  pip install --target FOLDER --no-deps TransferQueue tensordict pyvers orjson importlib_metadata zipp hydra-core
  PYTHONPATH=FOLDER python benchmarks/buffer.py

The memory of groups held is the growth of the resident set of a receiver that keeps all it took, from half of them to
all: what it had free, and used again, is taken up by the first half.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import ray
from common import Row, arguments, compare, publish
from common.queues import (
    BATCH,
    SAMPLES,
    End,
    Load,
    as_lists,
    counterflow_receiver,
    counterflow_sender,
    ray_receiver,
    ray_sender,
    redis_receiver,
    redis_sender,
    transfer_queue_receiver,
    transfer_queue_sender,
)
from ray.util.queue import Queue

from counterflow.buffer.server import EmbeddedServer

LOADS = (Load(tokens=512, groups=1024), Load(tokens=4096, groups=256))
ROUNDS = 5
TIMEOUT_S = 300
QUIET_S = 0.3
"""Between contenders, for what the one before leaves its server to do."""
WITH_TRANSFER_QUEUE = importlib.util.find_spec("transfer_queue") is not None


class Worker:
    """A process with one end of a queue."""

    def __init__(self, make: partial[End]) -> None:
        self._end = make()
        self._kept: list[Any] = []

    def move(self, batches: int) -> tuple[float, float]:
        """Send or receive so many batches; says when it began and ended."""
        began = time.monotonic()
        for _ in range(batches):
            self._end()
        return began, time.monotonic()

    def resident_bytes(self) -> int:
        """The resident set, without what was freed: it must not hide what will be kept."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return int(psutil.Process().memory_info().rss)

    def keep(self, batches: int) -> int:
        """Send or receive so many batches more and keep all; the resident set then."""
        self._kept += [self._end() for _ in range(batches)]
        return self.resident_bytes()


def spawn(make: partial[End]) -> Any:
    """A worker in a process of its own."""
    return ray.remote(num_cpus=0)(Worker).remote(make)


class Contender:
    """A queue with a worker at each end."""

    def __init__(self, sender: partial[End], receiver: partial[End], share: float = 1) -> None:
        self._share = share
        # The receiver first: a consumer group sees what comes after it.
        self.receiver = spawn(receiver)
        ray.get(self.receiver.move.remote(0), timeout=TIMEOUT_S)
        self.sender = spawn(sender)
        ray.get(self.sender.move.remote(0), timeout=TIMEOUT_S)
        self.rates: list[float] = []

    def rate(self, batches: int) -> float:
        """Groups/s from the first sent to the last received; a slow contender is given its share of the batches."""
        batches = max(round(batches * self._share), 1)
        ends = [end.move.remote(batches) for end in (self.receiver, self.sender)]
        (_, ended), (began, _) = ray.get(ends, timeout=TIMEOUT_S)
        return batches * BATCH / float(ended - began)

    @property
    def median(self) -> float:
        """Of all rounds."""
        return statistics.median(self.rates)


@contextmanager
def contenders(load: Load) -> Iterator[dict[str, Contender]]:
    """All of them, ready."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def server(name: str) -> Any:
            return stack.enter_context(EmbeddedServer(folder / name, timeout_s=20)).address

        durable, archived, bare = server("durable"), server("archived"), server("bare")
        found = {
            "counterflow": Contender(
                partial(counterflow_sender, durable, load),
                partial(counterflow_receiver, durable),
            ),
            "with archive": Contender(
                partial(counterflow_sender, archived, load),
                partial(counterflow_receiver, archived, folder / "archive"),
            ),
            "redis": Contender(partial(redis_sender, bare, load), partial(redis_receiver, bare)),
        }
        for at_once, by_trajectory in product((1, 16), (False, True)):
            queue = Queue(actor_options={"num_cpus": 0})
            found[f"ray {at_once} {'trajectories' if by_trajectory else 'groups'}"] = Contender(
                partial(ray_sender, queue, load, at_once, by_trajectory),
                partial(ray_receiver, queue, at_once, by_trajectory),
                share=0.125 if by_trajectory else 1,
            )
        if WITH_TRANSFER_QUEUE:
            found["transfer queue"] = Contender(partial(transfer_queue_sender, load), partial(transfer_queue_receiver))
        yield found
        for contender in found.values():
            ray.kill(contender.sender)
            ray.kill(contender.receiver)


def throughput(load: Load) -> list[Row]:
    """Ours against each rival."""
    batches = load.groups // BATCH
    with contenders(load) as found:
        for contender in found.values():
            contender.rate(batches)
        for _ in range(ROUNDS):
            for contender in found.values():
                time.sleep(QUIET_S)
                contender.rates.append(contender.rate(batches))
    for name, contender in found.items():
        print(f"{load.name}, {name}: {' '.join(f'{rate:,.0f}' for rate in contender.rates)} groups/s")
    rivals = [
        ("bare Redis, 32 at a time", "redis", 0.5),
        ("Ray's Queue, trajectories one by one", "ray 1 trajectories", 10.0),
        ("Ray's Queue, 16 trajectories at a time", "ray 16 trajectories", 3.0),
        ("Ray's Queue, groups one by one", "ray 1 groups", None),
        ("Ray's Queue, 16 groups at a time", "ray 16 groups", None),
        ("TransferQueue, 32 at a time", "transfer queue", 2.0),
    ]
    ours = found["counterflow"].median
    rows = [
        compare(f"groups/s, {load.name}, over {title}", ours, found[name].median, "higher", goal)
        for title, name, goal in rivals
        if name in found
    ]
    name = f"groups/s, {load.name}, with the archive over without"
    return [*rows, compare(name, found["with archive"].median, ours, "higher", None)]


def memory(load: Load, groups: int) -> list[Row]:
    """Resident bytes a response token of ours, against the most they may be and against Python lists."""
    half = groups // BATCH // 2
    tokens = half * BATCH * SAMPLES * load.tokens
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder), timeout_s=20) as server:
        address = server.address
        ours = Contender(partial(counterflow_sender, address, load), partial(counterflow_receiver, address))
        lists = spawn(partial(as_lists, load))
        keepers = (ours.receiver, lists)

        def keep() -> list[int]:
            working = [ours.sender.move.remote(half), *(worker.keep.remote(half) for worker in keepers)]
            return list(ray.get(working, timeout=TIMEOUT_S)[1:])

        at_half, at_all = keep(), keep()
        for worker in (ours.sender, *keepers):
            ray.kill(worker)
    by_ours, by_lists = ((then - before) / tokens for then, before in zip(at_all, at_half, strict=True))
    name = f"resident bytes/token, {groups} groups of {load.name}"
    return [
        compare(f"{name}, against 10", by_ours, 10, "lower", 1.0),
        compare(f"{name}, against Python lists", by_ours, by_lists, "lower", None),
    ]


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count()))
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=2 << 30,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    if WITH_TRANSFER_QUEUE:
        import transfer_queue  # type: ignore[import-not-found]
        from omegaconf import OmegaConf

        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    else:
        print("TransferQueue is not installed: its rows are left out")
    rows = [row for load in LOADS for row in throughput(load)]
    rows += memory(LOADS[0], 1024) + memory(LOADS[1], 256)
    publish("From actors to the learner", rows, options.json)


if __name__ == "__main__":
    main()
