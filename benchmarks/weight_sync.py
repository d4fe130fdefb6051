"""Weight sync, from a version's publication until an engine serves it: by phase, and against rivals in the same run.

Shared memory with a real vLLM engine, against a plain memory copy and against pickling through Ray's object store; then
broadcast to two receivers over gloo, against a bare one. Every process has one thread. Where there is a GPU, its part
of the NCCL path is measured, too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from common import Row, Shape, command_line, compare, publish, random_model
from common.broadcast import RECEIVERS, broadcasts
from common.object_store import ObjectStore
from common.timed_worker import TIMED_WORKER
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from counterflow.cluster import process_environment
from counterflow.configs.schema import RunConfig
from counterflow.configs.weight_sync import WeightSyncSection
from counterflow.weight_sync.buckets import checksum, largest_bytes, packed, plan
from counterflow.weight_sync.delivery import update
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import lay_out, named_weights
from counterflow.weight_sync.publisher import Publisher, Shipment, StagedVersion
from counterflow.weight_sync.slots import Slots
from counterflow.weight_sync.transports import SharedMemory

MODELS = {
    270: Shape(49_152, 576, 11, 9, 3, 1_536),
    1000: Shape(49_152, 1_024, 13, 16, 4, 4_096),
}
"""Llamas with as many megabytes of float32 parameters; the first is SmolLM2-135M with 11 of its 30 layers."""

MOST_COPIES = 3
"""What ours may take of a plain copy's time, vLLM's own loading left out."""
MOST_BROADCASTS = 1.3
"""What a broadcast may take of a bare one's time."""

PHASES = {
    "stage": "copy into the slot: all that the learner waits for",
    "prepare": "say where the slot is",
    "pause": "vLLM's own, when the step that goes on has ended",
    "transfer": "tensors handed to vLLM",
    "load": "vLLM's own loading and repacking",
    "proof": "fingerprints of what the engine holds",
    "wait": "for the fingerprints of the slot, taken meanwhile",
    "resume": "the calls between processes, resume",
}


@dataclass(frozen=True)
class Round:
    """One update and its rivals, in seconds."""

    phases: dict[str, float]
    copy: float
    object_store: float

    @property
    def stall(self) -> float:
        """For how long the engine samples nothing."""
        return sum(self.phases.values()) - self.phases["stage"] - self.phases["prepare"]

    @property
    def ours(self) -> float:
        """From publication until the engine has resumed, without what vLLM does with the tensors."""
        return sum(self.phases.values()) - self.phases["load"]


class Update:
    """An engine that is brought one version after the other through shared memory."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        path = random_model(folder / "model", shape, "float32")
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.layout = lay_out(named_weights(self._model), torch.float32)
        slots = Slots(self.layout)
        self._publisher = Publisher(slots, SharedMemory(slots))
        self._runner = asyncio.Runner()
        self._version = 0
        os.environ.update(process_environment(cpus=1, gpus=0))
        from counterflow.actors import vllm_engine

        # vLLM finds the worker's extension by its name.
        setattr(vllm_engine, "WORKER_EXTENSION", TIMED_WORKER)  # noqa: B010
        config = RunConfig.model_validate(
            {
                "model": {"path": path, "context_length": 256},
                "sampling": {"max_tokens": 16},
                "actors": {"kv_cache_bytes": 128 << 20, "dtype": "float32"},
            }
        )
        self._engine = self._runner.run(vllm_engine.VllmEngine.start(config))
        self._runner.run(self._engine.connect_weights("actor 0", self.layout))
        self._ask("time_updates")
        core: Any = self._engine._llm.engine_core
        self._pause, core.pause_scheduler_async = core.pause_scheduler_async, self._timed_pause

    def once(self) -> dict[str, float]:
        """Seconds of each phase of one update."""
        self._version += 1
        began = time.perf_counter()
        staged = self._publisher.stage(self._version, self._version % 2, named_weights(self._model))
        staged_at = time.perf_counter()
        shipment = self._publisher.prepare(staged, ["actor 0"])
        prepared_at = time.perf_counter()
        wait_s = self._runner.run(self._serve(staged, shipment))
        stall = time.perf_counter() - prepared_at
        inside = self._ask("update_times")
        phases = {"pause": self._pause_s, **{phase: inside[phase] for phase in ("transfer", "load", "proof")}}
        phases["wait"] = wait_s
        return {
            "stage": staged_at - began,
            "prepare": prepared_at - staged_at,
            **phases,
            "resume": stall - sum(phases.values()),
        }

    async def _serve(self, staged: StagedVersion, shipment: Shipment) -> float:
        """As delivery does it; returns for how many seconds only the learner's fingerprints were missing."""
        sending = asyncio.create_task(asyncio.to_thread(self._publisher.send, staged))
        wait_s = 0.0

        async def published() -> Fingerprints:
            nonlocal wait_s
            began = time.perf_counter()
            found = await sending
            wait_s = time.perf_counter() - began
            return found

        await update(self._engine, shipment, published())
        return wait_s

    def close(self) -> None:
        """End the engine and free the slots."""
        self._engine.shutdown()
        self._runner.close()
        self._publisher.close()
        del self._engine, self._pause
        gc.collect()

    async def _timed_pause(self, **how: Any) -> None:
        began = time.perf_counter()
        await self._pause(**how)
        self._pause_s = time.perf_counter() - began

    def _ask(self, method: str) -> Any:
        return self._runner.run(self._engine._llm.collective_rpc(method))[0]


def rounds(shape: Shape, count: int) -> list[Round]:
    """Updates and rivals in turns; the first ones, which touch the memory, are left out."""
    with tempfile.TemporaryDirectory() as folder:
        update = Update(Path(folder), shape)
        store = ObjectStore({slot.name: slot.shape for slot in update.layout.slots}, update.layout.dtype)
        given = torch.rand(update.layout.total_bytes // 4)
        taken = torch.zeros_like(given)
        try:
            return [Round(update.once(), _copy(given, taken), store.carry()) for _ in range(count + 2)][2:]
        finally:
            store.close()
            update.close()


def median(measured: list[Round], of: str) -> float:
    """Median over the rounds of one of their numbers."""
    numbers: list[float] = [getattr(one, of) for one in measured]
    return statistics.median(numbers)


def shared_memory_rows(size_mb: int, measured: list[Round]) -> list[Row]:
    """Ours against a plain copy, and with a copy into the engine's own tensors against Ray's object store."""
    ours, copy = median(measured, "ours"), median(measured, "copy")
    return [
        compare(
            f"{size_mb:,} MB through shared memory without vLLM's loading, s; plain copy",
            ours,
            copy,
            "lower",
            1 / MOST_COPIES,
        ),
        compare(
            f"{size_mb:,} MB through shared memory and copied, s; pickled through Ray's object store",
            ours + copy,
            median(measured, "object_store"),
            "lower",
            None,
        ),
    ]


def broadcast_row(size_mb: int) -> Row:
    """Ours against a bare broadcast: the fastest of each."""
    fastest = {side: min(seconds) for side, seconds in broadcasts(size_mb).items()}
    name = f"{size_mb:,} MB broadcast to {RECEIVERS} receivers over gloo, s; torch.distributed's bare broadcast"
    return compare(name, fastest["ours"], fastest["rival"], "lower", 1 / MOST_BROADCASTS)


def device_rows(size_mb: int) -> list[Row]:
    """The NCCL path as far as one GPU goes: staging, and a pass through checked buckets, against the GPU's own copy.

    Not run on its author's machine, which has no GPU.
    """
    width = 4096
    rows = size_mb * 10**6 // (2 * width)
    weights = [
        (f"weight-{i}", torch.rand(min(width, rows - first), width, dtype=torch.bfloat16, device="cuda"))
        for i, first in enumerate(range(0, rows, width))
    ]
    layout = lay_out(weights, torch.bfloat16)
    slots, buckets = Slots(layout, "cuda"), plan(layout, WeightSyncSection().bucket_bytes)
    buffers = [torch.empty(largest_bytes(buckets), dtype=torch.uint8, device="cuda") for _ in range(2)]
    given, taken = (torch.ones(layout.total_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))

    def through_buckets() -> None:
        for _, payload in packed(buckets, slots.tensors(0), cycle(buffers)):
            checksum(payload)

    copy = _on_device(lambda: taken.copy_(given))
    return [
        compare(f"{size_mb:,} MB {what} on the GPU, s; plain copy", _on_device(work), copy, "lower", None)
        for what, work in (("staged", lambda: slots.fill(0, weights)), ("through buckets", through_buckets))
    ]


def print_phases(measured: dict[int, list[Round]], step_s: float) -> None:
    """The table of phases, and how long engines stall."""
    table = Table("phase, s", *(f"{size:,} MB" for size in measured), "what", title="From publication to service")
    for phase, what in PHASES.items():
        medians = (statistics.median(one.phases[phase] for one in several) for several in measured.values())
        table.add_row(phase, *(f"{seconds:.3f}" for seconds in medians), what)
    stalls = [median(several, "stall") for several in measured.values()]
    table.add_row("stall", *(f"{seconds:.3f}" for seconds in stalls), "the engine samples nothing: pause to resume")
    if step_s:
        table.add_row("", *(f"{stall / step_s:.1%}" for stall in stalls), f"of a step of {step_s:g} s")
    Console(width=140).print(table)


def _copy(given: torch.Tensor, taken: torch.Tensor) -> float:
    began = time.perf_counter()
    taken.copy_(given)
    return time.perf_counter() - began


def _on_device(work: Any) -> float:
    """Median seconds of some work on the GPU."""
    seconds = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--sizes-mb", type=int, nargs="+", choices=MODELS, default=list(MODELS), metavar="MB")
    parser.add_argument("--rounds", type=int, default=7, help="updates of each size")
    parser.add_argument("--step-s", type=float, default=0.0, help="a step's seconds, to print the stall's share of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The broadcasts first: their processes inherit nothing of vLLM and Ray.
    broadcast = [broadcast_row(size_mb) for size_mb in options.sizes_mb]
    measured = {size_mb: rounds(MODELS[size_mb], options.rounds) for size_mb in options.sizes_mb}
    rows = [row for size_mb, several in measured.items() for row in shared_memory_rows(size_mb, several)] + broadcast
    if torch.cuda.is_available():
        rows += [row for size_mb in (1_000, 14_000) for row in device_rows(size_mb)]
    print_phases(measured, options.step_s)
    publish("Weight sync", rows, options.json)


if __name__ == "__main__":
    main()
