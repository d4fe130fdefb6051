"""Slots: what is staged is what is mapped, and nothing stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import by_group, fingerprint
from counterflow.weight_sync.layout import Layout, lay_out, named_weights
from counterflow.weight_sync.publisher import Publisher
from counterflow.weight_sync.slots import Slots, map_slot
from counterflow.weight_sync.transports import SharedMemory

PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Embedding(7, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_receiver_maps_other_bytes_than_were_staged(model: torch.nn.Module, dtype: torch.dtype) -> None:
    layout = lay_out(named_weights(model), dtype)
    slots = Slots(layout)
    publisher = Publisher(slots, SharedMemory(slots))
    for slot in (0, 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(slot + 1)
        staged = publisher.stage(slot + 1, slot, named_weights(model))
        shipment = publisher.prepare(staged, ["actor 0"])
        mapped = map_slot(shipment.way["path"], layout.total_bytes)
        received = dict(Layout.from_dict(layout.to_dict()).views(mapped))
        assert by_group((name, fingerprint(view)) for name, view in received.items()) == publisher.send(staged)
        for name, tensor in named_weights(model):
            assert torch.equal(received[name], tensor.to(dtype))
    publisher.close()
    assert not any(Path(path).exists() for path in slots.paths)


def _own_slots(pipe: Connection, layout: Layout) -> None:
    slots = Slots(layout)
    slots.fill(0, ((slot.name, torch.ones(slot.shape)) for slot in layout.slots))
    pipe.send(slots.paths)
    pipe.recv()


def test_learner_killed_leaves_its_slots_behind(model: torch.nn.Module) -> None:
    layout = lay_out(named_weights(model), torch.float32)
    pipe, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_own_slots, args=(theirs, layout))
    process.start()
    paths = pipe.recv()
    mapped = map_slot(paths[0], layout.total_bytes)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert all(torch.all(view == 1) for _, view in layout.views(mapped))
    with pytest.raises(WeightSyncError, match="is not on this host"):
        map_slot(paths[0], layout.total_bytes)


def test_memory_without_room_kills_the_learner() -> None:
    with pytest.raises(WeightSyncError, match=r"no room for 2 x .* bytes are free"):
        Slots(Layout((), total_bytes=1 << 62))


def test_tied_weights_travel_twice() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert [slot.name for slot in lay_out(named_weights(model), torch.float32).slots] == ["0.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given[::-1], "tensor '1.weight' of shape .* where the layout has '0.weight'"),
        (lambda given: given[:-1], "the tensors ended where the layout has '1.weight'"),
        (lambda given: [*given, given[0]], "tensor '0.weight' came after the last of the layout"),
        # A copy would be made of it, three times the same row.
        (lambda given: [(given[0][0], given[0][1][:1]), *given[1:]], r"of shape \(1, 3\) where .* of shape \(5, 3\)"),
    ],
)
def test_other_tensors_than_the_layouts_are_staged(model: torch.nn.Module, change: Any, words: str) -> None:
    slots = Slots(lay_out(named_weights(model), torch.float32))
    with pytest.raises(WeightSyncError, match=words):
        slots.fill(0, change(list(named_weights(model))))
    slots.close()
