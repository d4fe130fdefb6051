"""A vLLM worker that says where the time of a weight update went: hooks that benchmarks set in their own worker."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from counterflow.weight_sync import loaded
from counterflow.weight_sync.collective_receiver import Load
from counterflow.weight_sync.layout import NamedTensor
from counterflow.weight_sync.receiver import DeliveryProof
from counterflow.weight_sync.sources import BroadcastSource, SharedMemorySource, Source

TIMED_WORKER = f"{__name__}.TimedProof"


class Stopwatch:
    """Seconds of each phase, less those of the phases within it."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "", time.perf_counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The phase lasts as long as the context is open."""
        outer = self._enter(phase)
        try:
            yield
        finally:
            self._enter(outer)

    def within(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, timed as a phase."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return work(*args, **kwargs)

        return timed

    def drain(self) -> dict[str, float]:
        """Seconds since the last call."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def _enter(self, phase: str) -> str:
        outer, now = self._phase, time.perf_counter()
        self._seconds[outer] += now - self._since
        self._phase, self._since = phase, now
        return outer


class TimedProof(DeliveryProof):
    """Counterflow's extension of a worker, with a stopwatch. vLLM mixes it into the worker's class."""

    def time_updates(self) -> None:
        """Start to take times: `transfer`, `load` (vLLM's own, repacking too) and `proof`."""
        watch = self._stopwatch = Stopwatch()
        receiver: Any = self.weight_transfer_engine
        for step in ("start_weight_update", "receive_weights", "finish_weight_update"):
            setattr(receiver, step, watch.within("load", getattr(receiver, step)))
        receiver.fingerprints = watch.within("proof", receiver.fingerprints)
        module: Any = loaded
        module.fingerprint = watch.within("proof", module.fingerprint)
        for kind in (SharedMemorySource, BroadcastSource):
            _time_transfer(kind, watch)

    def update_times(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        return self._stopwatch.drain()


def _time_transfer(kind: type[Source], watch: Stopwatch) -> None:
    receive: Any = kind.receive

    def received(source: Source, way: dict[str, Any], version: int, load: Load) -> None:
        taken = watch.within("load", load)
        with watch.during("transfer"):
            receive(source, way, version, lambda tensors: taken(_handed_over(tensors, watch)))

    setattr(kind, "receive", received)  # noqa: B010


def _handed_over(tensors: Iterator[NamedTensor], watch: Stopwatch) -> Iterator[NamedTensor]:
    while True:
        with watch.during("transfer"):
            tensor = next(tensors, None)
        if tensor is None:
            return
        yield tensor
