"""A state dict through Ray's object store, pickled, from one worker into the tensors of another."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

_ROOM = 3
"""Copies of the state that the store has room for."""


class Giver:
    """The worker that holds the state."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        torch.set_num_threads(1)
        self._state = {name: torch.rand(shape).to(dtype) for name, shape in shapes.items()}

    def put(self) -> list[Any]:
        """Its reference, in a list, so that Ray passes it on unread."""
        import ray

        return [ray.put(self._state)]


class Taker:
    """The worker that wants it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        torch.set_num_threads(1)
        self._state = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}

    def take(self, reference: list[Any]) -> None:
        """Copy it into the tensors that are here."""
        import ray

        state = ray.get(reference[0])
        for name, tensor in self._state.items():
            tensor.copy_(state[name])


class ObjectStore:
    """Ray with the two workers, one core each, until it is closed."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        # Ray would run its workers at niceness 15.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        size = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_ROOM * size,
        )
        self._giver, self._taker = (ray.remote(num_cpus=1)(end).remote(shapes, dtype) for end in (Giver, Taker))

    def carry(self) -> float:
        """Seconds of one way through the store."""
        import ray

        began = time.perf_counter()
        ray.get(self._taker.take.remote(ray.get(self._giver.put.remote())))
        return time.perf_counter() - began

    def close(self) -> None:
        """End Ray."""
        import ray

        ray.shutdown()
