"""What ranks save of themselves: whole on rank 0, and gone on from by any number of them, on any backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_processes
from test_checkpoint import LEDGER, ORIGIN
from test_ranks import configured, steps

from counterflow.configs.schema import RunConfig
from counterflow.learner.checkpoint import CheckpointWriter, checkpoint_path, load_checkpoint, read_manifest
from counterflow.learner.rank import Rank
from counterflow.learner.trainer import TrainerState


def weights_of(rank: Rank) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in rank.weights()])


def go_on(number: int, config: RunConfig, begin: int, end: int, state: Path | None, saved: Path | None) -> Any:
    """The weights after these steps; a state is read, or written, on rank 0 alone."""
    rank = Rank(config)
    if state is not None:
        expected = TrainerState(rank.state(), {})
        path = checkpoint_path(state, 1)
        read = load_checkpoint(path, read_manifest(path, ORIGIN, config), expected) if number == 0 else expected
        rank.load_state(read.tensors)
    steps(rank, config, number, range(begin, end))
    if saved is not None:
        found = rank.state()
        if number == 0:
            writer = CheckpointWriter(saved, ORIGIN, config, 1)
            assert writer.save(TrainerState(found, {"version": 1}), LEDGER) and writer.wait(60)
        else:
            assert not found["model"] and not found["optimizer"], "a whole model on a rank that does not save it"
    return weights_of(rank).numpy()


def train(config: RunConfig, *args: Any) -> torch.Tensor:
    if config.learner.ranks == 1:
        return torch.from_numpy(go_on(0, config, *args))
    return torch.from_numpy(in_processes(config, go_on, config, *args))


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "ddp": {"ranks": 2, "backend": "ddp"},
    "fsdp2": {"ranks": 2},
    "fsdp2 by three": {"ranks": 3},
    "zero1": {"ranks": 2, "backend": "zero1"},
    "zero2": {"ranks": 2, "backend": "zero2"},
    "zero3": {"ranks": 2, "backend": "zero3"},
    "zero2 offloaded": {"ranks": 2, "backend": "zero2", "offload": "optimizer"},
    "zero3 offloaded": {"ranks": 2, "backend": "zero3", "offload": "weights"},
    "zero3 by three": {"ranks": 3, "backend": "zero3"},
}
TORCH = [
    ("fsdp2", "fsdp2 by three"),
    ("fsdp2 by three", "alone"),
    ("alone", "fsdp2"),
    ("ddp", "fsdp2"),
    ("fsdp2", "ddp"),
]
ZERO = [
    ("zero1", "alone"),
    ("alone", "zero2"),
    ("zero2", "zero1"),
    ("fsdp2", "zero3 by three"),
    ("zero3", "fsdp2"),
    ("zero2 offloaded", "zero3 offloaded"),
    ("zero3 offloaded", "alone"),
]


@pytest.mark.parametrize(("before", "after"), [*TORCH, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ZERO)])
def test_another_number_of_ranks_goes_on_where_some_stopped(
    tiny_model: Path, tmp_path: Path, before: str, after: str
) -> None:
    if "zero" in before + after:
        pytest.importorskip("deepspeed")
    first, second = (configured(tiny_model, "default", 1, **WAYS[way]) for way in (before, after))
    start = weights_of(Rank(first.model_copy(update={"learner": second.learner.model_copy(update={"ranks": 1})})))
    halfway = train(first, 0, 2, None, tmp_path / "state")
    found = train(second, 2, 4, tmp_path / "state", None)
    whole = train(configured(tiny_model, "default", 1), 0, 4, None, None)
    assert (found - whole).norm() <= 1e-3 * (whole - start).norm()
    assert (found - halfway).norm() > 0.1 * (whole - start).norm()
