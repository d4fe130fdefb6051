"""Slots: two places for whole versions, out of the optimizer's way. One may be on its way while the other is filled.

They have no name: whoever runs on this host, under the same user, maps them through the owner's open files,
and they end with the owner however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.layout import Layout, NamedTensor, expect, expect_end

SLOTS = 2


class Slots:
    """Room for two versions of one model.

    Args:
        layout: how a version lies in a slot.
        device: `cpu` for memory that other processes map, else a device of this process alone.

    Raises:
        WeightSyncError: there is no room.
    """

    def __init__(self, layout: Layout, device: str = "cpu") -> None:
        self.layout = layout
        self.paths: list[str] = []
        """Where processes of this host map the slots; empty on other devices."""
        self._descriptors: list[int] = []
        try:
            if device == "cpu":
                # The kernel would give all it has, then kill somebody.
                if SLOTS * layout.total_bytes > (there := psutil.virtual_memory().available):
                    raise MemoryError(f"{there:,} bytes are free")
                for slot in range(SLOTS):
                    self.paths.append(self._reserve(slot))
                self._buffers = [
                    torch.from_file(path, shared=True, size=layout.total_bytes, dtype=torch.uint8)
                    for path in self.paths
                ]
            else:
                shape = (layout.total_bytes,)
                self._buffers = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        except (OSError, MemoryError, RuntimeError) as error:
            self.close()
            raise WeightSyncError(
                f"no room for {SLOTS} x {layout.total_bytes:,} bytes on {device}, where versions are staged: {error}"
            ) from error

    def fill(self, slot: int, tensors: Iterable[NamedTensor]) -> None:
        """Copy the tensors, in the order of the layout, into `slot`, converting to the layout's dtype.

        Raises:
            WeightSyncError: they are not those of the layout.
        """
        given = iter(tensors)
        for place, (_, view) in zip(self.layout.slots, self.tensors(slot), strict=True):
            view.copy_(expect(given, place))
        expect_end(given)

    def tensors(self, slot: int) -> Iterator[NamedTensor]:
        """Name and view of every tensor in `slot`."""
        return self.layout.views(self._buffers[slot])

    def close(self) -> None:
        """Let go. Who has a slot mapped keeps its memory until it lets go, too."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _reserve(self, slot: int) -> str:
        """Bytes that are really there."""
        descriptor = os.memfd_create(f"counterflow-slot-{slot}", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        os.posix_fallocate(descriptor, 0, max(self.layout.total_bytes, 1))
        return f"/proc/{os.getpid()}/fd/{descriptor}"


def map_slot(path: str, size: int) -> torch.Tensor:
    """The bytes of a slot, uint8 [size]. What is written into them stays here, as copies of the pages it touches.

    Raises:
        WeightSyncError: it is not of this host, or its owner is gone.
    """
    if not Path(path).exists():
        raise WeightSyncError(
            f"{path} is not on this host, or of another user or container: shared memory reaches only actors beside "
            "the learner; set weight_sync.transport to gloo, nccl or disk"
        )
    return torch.from_file(path, size=size, dtype=torch.uint8)
