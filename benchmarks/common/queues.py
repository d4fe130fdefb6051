"""Ways to bring groups from one process to another: ours and its rivals, as two ends each.

A maker builds an end inside the process that is to use it; the end then moves one batch of groups at each call. Sending
ends make their groups beforehand; receiving ends return what arrived, acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from counterflow.buffer.archive import Archive
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Capacity, Lease, Producer
from counterflow.buffer.trajectory import Group, Origin, Trajectory, VersionSpan

BATCH = 32
SAMPLES, PROMPT_TOKENS, VOCABULARY = 8, 64, 150_000
ORIGIN = Origin(run_id="benchmark", model_fingerprint="model", tokenizer_fingerprint="tokenizer", sampling="{}")

_DEADLINE_S = 120
_POLL_S = 0.001

End = Callable[[], Any]
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Load:
    """`groups` different groups of 8 trajectories of `tokens` tokens: always the same ones."""

    tokens: int
    groups: int

    @property
    def name(self) -> str:
        """The shape of a group."""
        return f"{SAMPLES} x {self.tokens:,}"

    def build(self) -> list[Group]:
        """Make them."""
        return [self._group(i) for i in range(self.groups)]

    def _group(self, index: int) -> Group:
        rng = np.random.default_rng(index)
        trajectories = tuple(
            Trajectory(
                response_token_ids=rng.integers(VOCABULARY, size=self.tokens, dtype=np.int32),
                behavior_logprobs=-rng.exponential(size=self.tokens).astype(np.float32),
                version_spans=(VersionSpan(0, 0, self.tokens),),
                reward=float(rng.integers(2)),
                finish_reason="stop",
            )
            for _ in range(SAMPLES)
        )
        prompt = rng.integers(VOCABULARY, size=PROMPT_TOKENS, dtype=np.int32)
        return Group(f"group-{index}", index, index, prompt, trajectories, started_at_us=1, finished_at_us=2)


def counterflow_sender(address: Address, load: Load) -> End:
    """Admits a batch, encodes its groups and adds them, all of them in flight at once."""
    groups, schema = load.build(), ORIGIN.schema()
    producer = Producer(address, ORIGIN.run_id, capacity=Capacity(1 << 20, 1 << 40, BATCH), lease_s=600, attempts=1)
    runner = asyncio.Runner()

    async def add(lease: Lease) -> None:
        group = replace(groups[lease.admission % len(groups)], admission=lease.admission)
        await producer.add(group, encode(group, schema))

    async def send() -> None:
        leases, _ = await producer.admit(open_groups=2**53, wanted=BATCH)
        await asyncio.gather(*(add(lease) for lease in leases))

    return lambda: runner.run(send())


def counterflow_receiver(address: Address, archive: Path | None = None) -> End:
    """Takes a batch, decoded, and commits it; archives it first where a folder is given."""
    consumer = Consumer(address, ORIGIN, Archive(archive, ORIGIN) if archive else None)

    def receive() -> Any:
        entries = consumer.take(BATCH, timeout_s=_DEADLINE_S)
        consumer.commit(entries, consumer.version + 1)
        return entries

    return receive


def redis_sender(address: Address, load: Load) -> End:
    """Adds a batch of groups, encoded beforehand, to a stream in one pipeline."""
    payloads = cycle([encode(group, ORIGIN.schema()) for group in load.build()])
    client = connect(address)

    def send() -> None:
        with client.pipeline(transaction=False) as pipeline:
            for payload in islice(payloads, BATCH):
                pipeline.xadd("stream", {"payload": payload})
            pipeline.execute()

    return send


def redis_receiver(address: Address) -> End:
    """Reads a batch as a consumer group, acknowledges and deletes it in one pipeline; decodes nothing."""
    client = connect(address)
    client.xgroup_create("stream", "readers", mkstream=True)

    def receive() -> Any:
        answers: list[Any] = []
        # A read may find less than a batch.
        while (missing := BATCH - sum(len(entries) for entries in answers)) > 0:
            answer: Any = client.xreadgroup("readers", "reader", {"stream": ">"}, count=missing, block=100)
            for _, entries in answer or []:
                ids = [entry_id for entry_id, _ in entries]
                client.pipeline(transaction=False).xack("stream", "readers", *ids).xdel("stream", *ids).execute()
                answers.append(entries)
        return answers

    return receive


def ray_sender(queue: Any, load: Load, at_once: int, by_trajectory: bool) -> End:
    """Puts a batch on a Ray queue, `at_once` groups or trajectories with each call, as dicts of numpy arrays."""
    groups = as_arrays(load.build())
    items = cycle([_row(group, row) for group in groups for row in range(SAMPLES)] if by_trajectory else groups)
    count = BATCH * SAMPLES if by_trajectory else BATCH

    def send() -> None:
        if at_once == 1:
            for item in islice(items, count):
                queue.put(item)
        else:
            for _ in range(count // at_once):
                queue.put_nowait_batch(list(islice(items, at_once)))

    return send


def ray_receiver(queue: Any, at_once: int, by_trajectory: bool) -> End:
    """Gets a batch from a Ray queue, `at_once` items with each call."""
    count = BATCH * SAMPLES if by_trajectory else BATCH
    from ray.util.queue import Empty

    def get_some() -> Any:
        while True:
            try:
                return queue.get_nowait_batch(at_once)
            except Empty:
                time.sleep(_POLL_S)

    def receive() -> Any:
        if at_once == 1:
            return [queue.get(timeout=_DEADLINE_S) for _ in range(count)]
        return [get_some() for _ in range(count // at_once)]

    return receive


def transfer_queue_sender(load: Load) -> End:
    """Puts a batch with one call, a row a trajectory; its tensors are stacked beforehand."""
    import torch
    import transfer_queue  # type: ignore[import-not-found]
    from tensordict import TensorDict  # type: ignore[import-not-found]

    transfer_queue.init()
    client = transfer_queue.get_client()
    groups = as_arrays(load.build())
    batches = cycle(
        [
            TensorDict(
                {name: torch.from_numpy(np.concatenate([g[name] for g in batch])) for name in batch[0]},
                batch_size=BATCH * SAMPLES,
            )
            for batch in _batches(groups)
        ]
    )
    return lambda: client.put(data=next(batches), partition_id="benchmark")


def transfer_queue_receiver() -> End:
    """Asks for a batch until it is there, gets its data and clears it."""
    import transfer_queue

    transfer_queue.init()
    client = transfer_queue.get_client()

    def receive() -> Any:
        while True:
            metadata = client.get_meta(
                data_fields=["prompt_ids", "response_ids", "logprobs", "rewards"],
                batch_size=BATCH * SAMPLES,
                partition_id="benchmark",
                task_name="train",
            )
            if metadata.size:
                break
            time.sleep(_POLL_S)
        data = client.get_data(metadata)
        client.clear_samples(metadata)
        return data

    return receive


def as_arrays(groups: Sequence[Group]) -> list[Arrays]:
    """Groups as users of other queues would put them: dicts of numpy arrays, a row a trajectory."""
    return [
        {
            "prompt_ids": np.tile(group.prompt_token_ids, (SAMPLES, 1)),
            "response_ids": np.stack([t.response_token_ids for t in group.trajectories]),
            "logprobs": np.stack([t.behavior_logprobs for t in group.trajectories]),
            "rewards": np.array([t.reward for t in group.trajectories], np.float32),
        }
        for group in groups
    ]


def as_lists(load: Load) -> End:
    """No queue: makes a batch of groups as Python lists of ints and floats, as TRL's rollouts are."""
    arrays = cycle(as_arrays(load.build()))
    return lambda: [{name: a.tolist() for name, a in group.items()} for group in islice(arrays, BATCH)]


def _row(group: Arrays, row: int) -> Arrays:
    return {name: array[row].copy() for name, array in group.items()}


def _batches(groups: Sequence[Arrays]) -> Iterator[Sequence[Arrays]]:
    return (groups[at : at + BATCH] for at in range(0, len(groups), BATCH))
