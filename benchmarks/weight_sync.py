"""Weight sync, from a version's publication until an engine serves it: by phase, and against rivals in the same run.

Shared memory with a real vLLM engine, against a plain memory copy and against pickling through Ray's object store; then
broadcast to two receivers over gloo, against a bare one. Every process has one thread. Where there are GPUs, larger
models go from one into an engine on another (NCCL), or on the same one, against the GPU's own copy.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Row, Shape, command_line, compare, publish
from common.broadcast import RECEIVERS, broadcasts
from common.engine_updates import PHASES, EngineUpdates, Placement
from common.object_store import ObjectStore
from rich.console import Console
from rich.table import Table

MODELS = {
    270: Shape(49_152, 576, 11, 9, 3, 1_536),
    1000: Shape(49_152, 1_024, 13, 16, 4, 4_096),
}
"""Llamas with as many megabytes of float32 parameters; the first is SmolLM2-135M with 11 of its 30 layers."""

GPU_MODELS = {
    "0.5 B": Shape(151_936, 896, 24, 14, 2, 4_864),
    "7 B": Shape(32_000, 4_096, 32, 32, 32, 11_008),
}
"""Of the shapes of Qwen2.5-0.5B and Llama-2-7B, with tied embeddings."""

MOST_COPIES = 3
"""What ours may take of a plain copy's time, vLLM's own loading left out."""
MOST_BROADCASTS = 1.3
"""What a broadcast may take of a bare one's time."""


@dataclass(frozen=True)
class Round:
    """One update and its rivals, in seconds."""

    phases: dict[str, float]
    copy: float
    object_store: float = 0.0

    @property
    def stall(self) -> float:
        """For how long the engine samples nothing."""
        return self.whole - self.phases["stage"] - self.phases["prepare"]

    @property
    def whole(self) -> float:
        """From publication until the engine has resumed."""
        return sum(self.phases.values())

    @property
    def ours(self) -> float:
        """The same without what vLLM does with the tensors."""
        return self.whole - self.phases["load"]


def rounds(shape: Shape, count: int) -> list[Round]:
    """Updates and rivals in turns; the first ones, which touch the memory, are left out."""
    with tempfile.TemporaryDirectory() as folder:
        updates = EngineUpdates(Path(folder), shape, Placement())
        store = ObjectStore({slot.name: slot.shape for slot in updates.layout.slots}, updates.layout.dtype)
        given = torch.rand(updates.layout.total_bytes // 4)
        taken = torch.zeros_like(given)
        try:
            return [Round(updates.once(), _copy(given, taken), store.carry()) for _ in range(count + 2)][2:]
        finally:
            store.close()
            updates.close()


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


def on_gpus(shape: Shape, count: int) -> list[Round]:
    """Updates from the learner's GPU into an engine's, and a copy of the same bytes on the learner's.

    NCCL does not join two processes on one GPU: where there is one alone, versions go through shared memory. Not run on
    its author's machine, which has no GPU.
    """
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(gpus - 1)
    placement = Placement("bfloat16", f"cuda:{gpus - 1}", 1, "nccl" if gpus > 1 else "shared_memory")
    with tempfile.TemporaryDirectory() as folder:
        updates = EngineUpdates(Path(folder), shape, placement)
        given, taken = (torch.ones(updates.layout.total_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        try:
            return [Round(updates.once(), _copy(given, taken)) for _ in range(count + 2)][2:]
        finally:
            updates.close()


def gpu_row(size: str, measured: list[Round]) -> Row:
    """From the learner's GPU until the engine serves it, vLLM's own loading in it, against the GPU's own copy."""
    name = f"{size} parameters in bfloat16 from GPU to vLLM, s; plain copy on the GPU"
    return compare(name, median(measured, "whole"), median(measured, "copy"), "lower", None)


def print_phases(measured: dict[str, list[Round]], step_s: float) -> None:
    """The table of phases, and how long engines stall."""
    table = Table("phase, s", *measured, "what", title="From publication to service")
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
    if given.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


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
    columns = {f"{size_mb:,} MB": several for size_mb, several in measured.items()}
    if torch.cuda.is_available():
        gpu = {size: on_gpus(shape, options.rounds) for size, shape in GPU_MODELS.items()}
        rows += [gpu_row(size, several) for size, several in gpu.items()]
        columns |= {f"{size}, GPU": several for size, several in gpu.items()}
    print_phases(columns, options.step_s)
    publish("Weight sync", rows, options.json)


if __name__ == "__main__":
    main()
