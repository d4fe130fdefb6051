"""How a model's tensors lie in one buffer: the map that publisher and receivers share. Data, and pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.adapter import Adapter

NamedTensor = tuple[str, torch.Tensor]

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

    def views(self, buffer: torch.Tensor) -> Iterator[NamedTensor]:
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
        return self.dtype if self.adapter is None else getattr(torch, self.adapter.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for vLLM's weight-transfer calls."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layout:
        """The layout that `to_dict` wrote."""
        slots = tuple(TensorSlot(**{**slot, "shape": tuple(slot["shape"])}) for slot in data["slots"])
        return cls(slots, data["total_bytes"], data["adapter"] and Adapter.from_dict(data["adapter"]))


def named_weights(model: torch.nn.Module) -> Iterator[NamedTensor]:
    """The parameters of a model under their Hugging Face names; tied ones once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def lay_out(tensors: Iterable[NamedTensor], dtype: torch.dtype, adapter: Adapter | None = None) -> Layout:
    """The layout of tensors sent as `dtype`."""
    slots, offset = [], 0
    for name, tensor in tensors:
        size = tensor.numel() * dtype.itemsize
        slots.append(TensorSlot(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(slots), offset, adapter)


def expect(tensors: Iterator[NamedTensor], slot: TensorSlot) -> torch.Tensor:
    """The next of the tensors, which must be the one that belongs in this place.

    Raises:
        WeightSyncError: it has another name or shape, or there is none.
    """
    given = next(tensors, None)
    if given is None:
        raise WeightSyncError(f"the tensors ended where the layout has {slot.name!r}")
    name, tensor = given
    if (name, tuple(tensor.shape)) != (slot.name, slot.shape):
        raise WeightSyncError(
            f"tensor {name!r} of shape {tuple(tensor.shape)} where the layout has {slot.name!r} of shape {slot.shape}"
        )
    return tensor.detach()


def expect_end(tensors: Iterator[NamedTensor]) -> None:
    """See that there are no more tensors.

    Raises:
        WeightSyncError: there are.
    """
    if (left := next(tensors, None)) is not None:
        raise WeightSyncError(f"tensor {left[0]!r} came after the last of the layout")
