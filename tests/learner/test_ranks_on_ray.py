"""The learner with a second rank as a Ray actor: weights of one rank, published whole, and its death told by name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from groups import uneven_groups
from test_learner_objective import offer

from counterflow.buffer.connection import Address
from counterflow.buffer.trajectory import Origin
from counterflow.cluster import process_environment
from counterflow.configs.schema import RunConfig
from counterflow.errors import LearnerDied
from counterflow.learner.learner import Learner
from counterflow.learner.ranks import Follower


def configured(folder: Path, ranks: int, backend: str = "fsdp2") -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "sampling": {"max_tokens": 32},
            "admission": {"groups_per_step": 5, "samples_per_group": 3, "max_lag": 8},
            "buffer": {"uses": 2},
            "learner": {"lr": 1e-3, "ranks": ranks, "backend": backend, "microbatch_tokens": 60},
            "run": {"step_timeout_s": 120},
            "objective": {"kl": {"beta": 0.05}},
        }
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    yield
    ray.shutdown()


def follower(config: RunConfig) -> Any:
    environment = {**process_environment(1, 0), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    options = ray.remote(Follower).options(num_cpus=1, runtime_env={"env_vars": environment})
    return options.remote(config, 1, None)


def trained(learner: Learner, server: Address, origin: Origin) -> tuple[list[Any], torch.Tensor]:
    """Records of two steps on the same groups, and the weights that actors would get."""
    offer(server, origin, uneven_groups(5))
    records = [learner.step().record for _ in range(2)]
    learner.stage(0)
    slots = learner._publisher._slots
    return records, torch.cat([tensor.flatten().clone() for _, tensor in slots.tensors(0)])


@pytest.mark.slow
def test_a_second_rank_changes_nothing_and_its_death_is_told_by_name(
    cluster: None, server: Address, origin: Origin, tmp_path: Path, tiny_model: Path
) -> None:
    config = configured(tiny_model, ranks=1)
    with closing(Learner(tmp_path / "one", config, server, origin, time.time(), cores=None)) as learner:
        records, target = trained(learner, server, origin)
    other = Origin(origin.run_id + "-two", origin.model_fingerprint, origin.tokenizer_fingerprint, origin.sampling)
    config = configured(tiny_model, ranks=2)
    second = follower(config)
    with closing(Learner(tmp_path / "two", config, server, other, time.time(), None, [second])) as learner:
        found, weights = trained(learner, server, other)
        assert (weights - target).norm() <= 1e-4 * target.norm()
        for ours, theirs in zip(found, records, strict=True):
            assert (ours.tokens, ours.lag_histogram) == (theirs.tokens, theirs.lag_histogram)
            for name in ("loss", "grad_norm", "kl_reference", "entropy", "ess_sequence"):
                assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-3, abs=1e-5)
        learner.save(tmp_path / "model")
        assert (tmp_path / "model" / "model.safetensors").stat().st_size > 4 * target.numel() * 0.99
        offer(server, other, [g for g in uneven_groups(10) if g.admission >= 5])
        ray.kill(second)
        began = time.monotonic()
        with pytest.raises(LearnerDied, match=r"learner rank 1 of 2 died, asked to (begin|accumulate)"):
            learner.step()
        assert time.monotonic() - began < 60
