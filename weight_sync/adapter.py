"""Low-rank adapters, where only they travel: every host has the base on its disk, and merges what arrives into it.

Tensors of an adapter flow in from a transport, whole weights flow out to the engine that loads them. A merge is not the
same to the last bit on every device, so it is proved in two halves: the learner compares what arrived, the engine's
host what was merged with what the engine holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import Fingerprint, Fingerprints, by_group, disagreements, fingerprint

if TYPE_CHECKING:
    from counterflow.weight_sync.layout import NamedTensor

DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""What follows a layer's name in those of its two matrices: W + scaling x UP DOWN is its merged weight."""


@dataclass(frozen=True)
class Adapter:
    """What an adapter belongs to, and what becomes of the two."""

    folder: str
    """Where the base lies on every host, as safetensors."""
    names: tuple[str, ...]
    """Its tensors; no others are read."""
    scaling: float
    dtype: str
    """In which merged weights are loaded."""
    base: tuple[int, int]
    """Fingerprint of the base, which must be the learner's."""

    @classmethod
    def of(cls, folder: Path, names: Iterable[str], scaling: float, dtype: torch.dtype) -> Adapter:
        """An adapter of the base in `folder`.

        Raises:
            WeightSyncError: a tensor is not there.
        """
        names = tuple(names)
        found = base_fingerprint(read_base(folder, names))
        return cls(str(folder), names, scaling, str(dtype).removeprefix("torch."), (found.words, found.squares))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Adapter:
        """The adapter that `asdict` wrote."""
        return cls(**{**data, "names": tuple(data["names"]), "base": tuple(data["base"])})


def read_base(folder: Path, names: Iterable[str]) -> Iterator[NamedTensor]:
    """Tensors of a model folder, one after the other, by the names they have on the disk.

    Raises:
        WeightSyncError: one is not there.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
            where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            for name in names:
                if name not in where:
                    raise WeightSyncError(f"{folder} holds no tensor {name} in its safetensors files")
                yield name, where[name].get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"the base of the adapter in {folder} cannot be read ({error})") from error


def base_fingerprint(base: Iterable[NamedTensor]) -> Fingerprint:
    """One fingerprint of all tensors."""
    return sum((fingerprint(tensor) for _, tensor in base), Fingerprint(0, 0))


def merged(
    base: Iterable[NamedTensor],
    adapter: Mapping[str, torch.Tensor],
    scaling: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[NamedTensor]:
    """The base with the adapter's matrices added, in float32; the rest of it as it is."""
    for name, weight in base:
        stem = name.removesuffix(".weight")
        if stem + DOWN in adapter:
            down, up = (adapter[stem + matrix].to(device, torch.float32) for matrix in (DOWN, UP))
            weight = torch.addmm(weight.to(device, torch.float32), up, down, alpha=scaling)
        yield name, weight.to(dtype)


class Merger:
    """One engine rank's base, and the adapter that arrives for it.

    Raises:
        WeightSyncError: its folder holds another base than the learner's.
    """

    def __init__(self, adapter: Adapter, device: str) -> None:
        self._adapter, self._folder, self._device = adapter, Path(adapter.folder), torch.device(device)
        found = base_fingerprint(read_base(self._folder, adapter.names))
        if (found.words, found.squares) != adapter.base:
            raise WeightSyncError(
                f"{self._folder} holds another model here than on the learner's host: copy the learner's to every host"
            )
        self._arrived: dict[str, torch.Tensor] = {}
        self._merged: Fingerprints = {}

    def arrive(self, tensors: Iterable[NamedTensor]) -> None:
        """Take tensors of the adapter. What they are views of may be filled again."""
        self._arrived.update((name, tensor.clone()) for name, tensor in tensors)

    def load(self, load: Callable[[Iterator[NamedTensor]], None]) -> None:
        """Have `load` take every tensor of the merged model."""
        adapter, handed = self._adapter, []

        def noted() -> Iterator[NamedTensor]:
            base = read_base(self._folder, adapter.names)
            dtype = getattr(torch, adapter.dtype)
            for name, tensor in merged(base, self._arrived, adapter.scaling, dtype, self._device):
                handed.append((name, fingerprint(tensor)))
                yield name, tensor

        load(noted())
        self._merged = by_group(handed)

    def vouch(self, held: Fingerprints, *, whole: bool) -> Fingerprints:
        """Fingerprints of the adapter that arrived, once the engine is seen to hold what was merged.

        Args:
            held: what the engine holds.
            whole: whether it holds all of every tensor, as an engine of one rank does.

        Raises:
            WeightSyncError: it holds something else; names the tensor groups.
        """
        if whole and (wrong := disagreements(self._merged, [held])):
            raise WeightSyncError(f"the engine holds other weights than were merged in tensor group {', '.join(wrong)}")
        return by_group((name, fingerprint(tensor)) for name, tensor in self._arrived.items())
