"""The learner's end of weight sync over shared memory: copies a version out of the optimizer's way, for actors to map.

Two slots: one may be on its way to the actors while the next version is staged in the other. The files are made in
memory (/dev/shm) and belong to the publisher, which removes them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import Fingerprints, by_group, fingerprint
from counterflow.weight_sync.layout import Layout

SLOTS = 2


@dataclass(frozen=True)
class StagedVersion:
    """A policy version that lies ready in a slot."""

    version: int
    slot: int
    fingerprints: Fingerprints
    """Of what lies in the slot: what an engine must hold once it is loaded."""


def shared_memory_folder() -> Path:
    """Where files live in memory on this machine; the temporary folder where there is no such place."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def slot_paths(run_id: str) -> list[Path]:
    """The files that hold a run's slots."""
    return [shared_memory_folder() / f"counterflow-{run_id}-{slot}" for slot in range(SLOTS)]


class SharedMemoryPublisher:
    """Stages versions of one model in the run's slots.

    Raises:
        WeightSyncError: there is no room for the slots.
    """

    def __init__(self, run_id: str, layout: Layout) -> None:
        self.layout = layout
        self.paths = slot_paths(run_id)
        try:
            for path in self.paths:
                _reserve(path, layout.total_bytes)
            self._buffers = [map_slot(path, layout.total_bytes) for path in self.paths]
        except (OSError, RuntimeError) as error:
            self.close()
            raise WeightSyncError(
                f"no room for {SLOTS} x {layout.total_bytes:,} bytes in {shared_memory_folder()}: {error}"
            ) from error

    def stage(self, version: int, slot: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedVersion:
        """Copy the tensors, in the order of the layout, into `slot`, converting to the layout's dtype."""
        buffer = self._buffers[slot]
        for (name, view), (given, tensor) in zip(self.layout.views(buffer), tensors, strict=True):
            if name != given:
                raise WeightSyncError(f"version {version}: tensor {given!r} where the layout has {name!r}")
            view.copy_(tensor)
        named = ((name, fingerprint(view)) for name, view in self.layout.views(buffer))
        return StagedVersion(version, slot, by_group(named))

    def close(self) -> None:
        """Remove the files. Receivers that have them mapped keep their memory until they let go."""
        for path in self.paths:
            path.unlink(missing_ok=True)


def _reserve(path: Path, size: int) -> None:
    """Make a file of `size` bytes that are really there: writing past a full memory disk would kill the process."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def map_slot(path: Path, size: int) -> torch.Tensor:
    """The bytes of a slot as a uint8 tensor, shared with every process that maps it."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
