"""A reference that becomes the policy every so many versions: when, on all ranks, and after a checkpoint too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rank_processes import in_processes
from test_checkpoint import entries, load, weights, write
from test_ranks import steps

from counterflow.configs.schema import RunConfig
from counterflow.learner.rank import Rank
from counterflow.learner.trainer import Trainer


def configured(model: Path, every: int, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 2, "samples_per_group": 3, "max_lag": 99},
            "objective": {"kl": {"beta": 1.0, "reference_every": every}},
            "learner": {"lr": 1e-3, **learner},
            "run": {"step_timeout_s": 120},
        }
    )


def reference_of(trainer: Trainer) -> torch.Tensor:
    assert trainer.policy.reference is not None
    return torch.cat([p.flatten().clone() for p in trainer.policy.reference.parameters()])


def test_reference_is_of_another_version_than_the_record_says(tiny_model: Path) -> None:
    trainer = Trainer(configured(tiny_model, 2))
    versions = [weights(trainer)]
    for step in range(5):
        reference = reference_of(trainer)
        record, _ = trainer.train(entries(step))
        assert record.reference_version == 2 * (step // 2)
        assert torch.equal(reference, versions[record.reference_version])
        versions.append(weights(trainer))


def test_log_probs_of_the_reference_before_are_kept(tiny_model: Path) -> None:
    """The same groups again: with a reference that has just become the policy, they are nothing apart."""
    fixed, moving = (Trainer(configured(tiny_model, every)) for every in (0, 1))
    for trainer in (fixed, moving):
        trainer.train(entries(0))
    assert fixed.train(entries(0))[0].kl_reference > 1e-6
    assert moving.train(entries(0))[0].kl_reference == 0


def test_reference_after_a_checkpoint_is_the_model_again(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, 2)
    whole = Trainer(config)
    for step in range(3):
        whole.train(entries(step))
    path = write(tmp_path, whole, config)
    resumed = load(path, config)
    assert torch.equal(reference_of(resumed), reference_of(whole))
    again, rest = ([trainer.train(entries(step))[0] for step in range(3, 6)] for trainer in (resumed, whole))
    assert again == rest and rest[0].reference_version == 2
    assert torch.equal(weights(resumed), weights(whole))


def go_on(number: int, configs: list[RunConfig]) -> list[Any]:
    """Weights after two steps, another reference, two steps, and two from a state, where the reference moves again."""
    found = []
    for config in configs:
        rank = Rank(config)
        steps(rank, config, number, range(2))
        rank.renew_reference()
        steps(rank, config, number, range(2, 4))
        saved = rank.state()
        fresh = Rank(config)
        fresh.load_state(saved if number == 0 else {})
        steps(fresh, config, number, range(4, 5))
        fresh.renew_reference()
        steps(fresh, config, number, range(5, 6))
        found.append(torch.cat([tensor.flatten().clone() for _, tensor in fresh.weights()]).numpy())
    return found


def test_ranks_have_another_reference_than_one_process(tiny_model: Path) -> None:
    small = {"microbatch_tokens": 60}
    one, still = (configured(tiny_model, every, **small) for every in (2, 0))
    alone = torch.from_numpy(go_on(0, [one])[0])
    unmoved = Rank(still)
    steps(unmoved, still, 0, range(6))
    otherwise = torch.cat([tensor.flatten().clone() for _, tensor in unmoved.weights()])
    several = [configured(tiny_model, 2, ranks=2, backend=backend, **small) for backend in ("ddp", "fsdp2")]
    for found in in_processes(several[0], go_on, several):
        assert (torch.from_numpy(found) - alone).norm() <= 0.01 * (otherwise - alone).norm()


@pytest.mark.parametrize(
    ("learner", "words"),
    [({"lora": {}}, "with learner.lora"), ({"ranks": 2, "backend": "zero1"}, "with learner.backend=zero1")],
)
def test_reference_that_cannot_move_is_said_to(tiny_model: Path, learner: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=rf"reference_every=3 {words}"):
        RunConfig.model_validate(
            {
                **configured(tiny_model, 3).model_dump(),
                "learner": learner,
                "checkpoint": {"every": 0},
            }
        )
