"""Shared memory: what is staged is what is mapped, and no file stays."""

from __future__ import annotations

import pytest
import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import by_group, fingerprint
from counterflow.weight_sync.layout import Layout, lay_out, named_weights
from counterflow.weight_sync.publisher import SharedMemoryPublisher, map_slot, slot_paths


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Embedding(7, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_receiver_maps_other_bytes_than_were_staged(model: torch.nn.Module, dtype: torch.dtype) -> None:
    layout = lay_out(named_weights(model), dtype)
    publisher = SharedMemoryPublisher("test-publisher", layout)
    try:
        for slot in (0, 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(slot + 1)
            staged = publisher.stage(slot + 1, slot, named_weights(model))
            mapped = map_slot(publisher.paths[slot], layout.total_bytes)
            received = dict(Layout.from_dict(layout.to_dict()).views(mapped))
            assert by_group((name, fingerprint(view)) for name, view in received.items()) == staged.fingerprints
            for name, tensor in named_weights(model):
                assert torch.equal(received[name], tensor.to(dtype))
    finally:
        publisher.close()
    assert not any(path.exists() for path in publisher.paths)


def test_memory_disk_without_room_kills_the_learner() -> None:
    with pytest.raises(WeightSyncError, match="no room for 2 x"):
        SharedMemoryPublisher("test-room", Layout((), total_bytes=1 << 50))
    assert not any(path.exists() for path in slot_paths("test-room"))


def test_tied_weights_travel_twice() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert [slot.name for slot in lay_out(named_weights(model), torch.float32).slots] == ["0.weight"]


def test_tensor_lands_in_another_tensors_place(model: torch.nn.Module) -> None:
    publisher = SharedMemoryPublisher("test-order", lay_out(named_weights(model), torch.float32))
    try:
        with pytest.raises(WeightSyncError, match="tensor '1.weight' where the layout has '0.weight'"):
            publisher.stage(1, 0, reversed(list(named_weights(model))))
    finally:
        publisher.close()
