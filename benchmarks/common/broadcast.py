"""Broadcast of weights to two receivers over gloo, ours and one bare torch.distributed.broadcast of as many bytes.

Ours copies the parameters into buckets, checks each bucket at both ends and hands on its tensors; the rival sends one
flat tensor. Both run in the same three processes, in turns.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections import deque
from itertools import cycle
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from counterflow.configs.weight_sync import WeightSyncSection
from counterflow.weight_sync.collective import Sender
from counterflow.weight_sync.collective_receiver import Receiver
from counterflow.weight_sync.layout import Layout, lay_out

RECEIVERS = 2

_WIDTH, _TIMEOUT_S = 1024, 120.0


def parameters(size_mb: int) -> list[tuple[str, torch.Tensor]]:
    """Parameters as a transformer has them, matrices of two sizes and vectors: float32, `size_mb` in all."""
    tensors: list[tuple[str, torch.Tensor]] = []
    left = size_mb * 10**6 // (4 * _WIDTH)
    for rows in cycle((_WIDTH, 4 * _WIDTH, 1)):
        if not left:
            return tensors
        rows = min(rows, left)
        tensors.append((f"weight-{len(tensors)}", torch.rand(rows, _WIDTH)))
        left -= rows
    raise AssertionError


def ours(rank: int, pipe: Connection, size_mb: int, layout: Layout, bucket_bytes: int, repeats: int) -> list[float]:
    """Seconds of each broadcast through buckets."""
    seconds = []
    if rank == 0:
        tensors = parameters(size_mb)
        sender = Sender(layout, bucket_bytes=bucket_bytes, timeout_s=_TIMEOUT_S)
        pipe.send(sender.invite([f"actor-{i}" for i in range(RECEIVERS)]))
        sender.connect()
        for version in range(repeats + 1):
            dist.barrier()
            began = time.perf_counter()
            sender.send(version, tensors)
            seconds.append(time.perf_counter() - began)
        sender.close()
    else:
        receiver = Receiver(f"actor-{rank - 1}", layout)
        receiver.join(pipe.recv())
        for version in range(repeats + 1):
            dist.barrier()
            receiver.receive(version, lambda tensors: deque(tensors, maxlen=0))
        receiver.close()
    return seconds[1:]


def bare(rank: int, layout: Layout, repeats: int) -> list[float]:
    """Seconds of each broadcast of one flat tensor, until every receiver has it."""
    flat = torch.rand(layout.total_bytes // 4)
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(flat, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def run_rank(
    rank: int, rendezvous: Path, pipe: Connection, size_mb: int, bucket_bytes: int, repeats: int, turns: int
) -> None:
    """One of the processes. Rank 0 answers with the seconds of either side."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RECEIVERS + 1)
    layout = lay_out(parameters(size_mb), torch.float32)
    taken: dict[str, list[float]] = {"ours": [], "rival": []}
    for _ in range(turns):
        taken["rival"] += bare(rank, layout, repeats)
        taken["ours"] += ours(rank, pipe, size_mb, layout, bucket_bytes, repeats)
    if rank == 0:
        pipe.send(taken)
    dist.barrier()
    dist.destroy_process_group()


def answer(pipe: Connection, ranks: list[SpawnProcess]) -> Any:
    """What comes through the pipe while all processes live."""
    ready = wait([pipe, *(process.sentinel for process in ranks)], timeout=600)
    if pipe not in ready:
        sys.exit("a process died or hangs")
    return pipe.recv()


def broadcasts(
    size_mb: int, bucket_bytes: int = WeightSyncSection().bucket_bytes, repeats: int = 4, turns: int = 3
) -> dict[str, list[float]]:
    """Seconds of each broadcast, `ours` and the `rival`'s: `repeats` of a side in a row, the sides taking turns."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RECEIVERS + 1)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=run_rank,
                args=(rank, Path(folder) / "rendezvous", theirs, size_mb, bucket_bytes, repeats, turns),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _ in range(turns):
            invitation = answer(pipes[0][0], ranks)
            for pipe, _ in pipes[1:]:
                pipe.send(invitation)
        taken: dict[str, list[float]] = answer(pipes[0][0], ranks)
        for process in ranks:
            process.join(60)
    return taken
