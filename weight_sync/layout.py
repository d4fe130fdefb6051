"""How a model's tensors lie in one buffer: the map that publisher and receivers share. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from counterflow.weight_sync.adapter import Adapter

ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSlot:
    """One tensor in the buffer: `shape` of `dtype` from byte `offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, each once, aligned to 64 bytes."""

    slots: tuple[TensorSlot, ...]
    total_bytes: int
    adapter: Adapter | None = None
    """What the tensors are to be merged into; None where they are the model's own."""

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of every tensor in `buffer`, a uint8 tensor of at least `total_bytes`. Copies nothing."""
        for slot in self.slots:
            raw = buffer[slot.offset : slot.offset + slot.size_bytes]
            yield slot.name, raw.view(getattr(torch, slot.dtype)).view(slot.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype in which all tensors are sent."""
        (dtype,) = {slot.dtype for slot in self.slots}
        return getattr(torch, dtype)  # type: ignore[no-any-return]

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The dtype in which an engine is given what it loads."""
        return self.dtype if self.adapter is None else getattr(torch, self.adapter.dtype)  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for vLLM's weight-transfer calls."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layout:
        """The layout that `to_dict` wrote."""
        slots = tuple(TensorSlot(**{**slot, "shape": tuple(slot["shape"])}) for slot in data["slots"])
        return cls(slots, data["total_bytes"], data["adapter"] and Adapter.from_dict(data["adapter"]))


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model under their Hugging Face names; tied ones once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def lay_out(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, adapter: Adapter | None = None) -> Layout:
    """The layout of tensors sent as `dtype`."""
    slots, offset = [], 0
    for name, tensor in tensors:
        size = tensor.numel() * dtype.itemsize
        slots.append(TensorSlot(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(slots), offset, adapter)
