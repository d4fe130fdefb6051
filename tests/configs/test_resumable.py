"""What a resumed run may be told anew."""

from __future__ import annotations

from typing import Any

import pytest

from counterflow.configs import as_data, load_config
from counterflow.configs.load import _known_keys
from counterflow.configs.resumable import _FREE_KEYS, _FREE_SECTIONS, differing_keys


def plain(*overrides: str) -> Any:
    return as_data(load_config(None, overrides))


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("learner.cpus=2", "actors.count=3", "evaluation.every=1", "run.steps=999", "buffer.url=redis://h"), []),
        (("learner.lr=1", "objective.kl.beta=0", "admission.max_lag=inf"), None),
        (("task.parameters.min_words=3",), ["task.parameters"]),
        (("sampling.stop=[a]", "run.seed=1"), ["run.seed", "sampling.stop"]),
    ],
)
def test_key_that_changes_training_is_let_through(overrides: tuple[str, ...], keys: list[str] | None) -> None:
    expected = sorted(o.partition("=")[0] for o in overrides) if keys is None else keys
    assert differing_keys(plain(), plain(*overrides)) == expected


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rate_falls_anew_after_a_resume(schedule: str) -> None:
    falls = f"learner.schedule={schedule}"
    assert differing_keys(plain(falls), plain(falls, "run.steps=999")) == ["run.steps"]
    ends = "learner.schedule_steps=50"
    assert differing_keys(plain(falls, ends), plain(falls, ends, "run.steps=999")) == []


def test_free_key_is_none_of_the_schema() -> None:
    known = set(_known_keys())
    assert known >= _FREE_KEYS and known >= set(_FREE_SECTIONS)


def test_timeout_binds_a_resumed_run() -> None:
    timeouts = {key for key in _known_keys() if key.endswith("timeout_s")}
    assert len(timeouts) > 5
    assert {key for key in timeouts if key.partition(".")[0] not in _FREE_SECTIONS} <= _FREE_KEYS


def test_offload_binds_a_resumed_run_to_its_backend() -> None:
    offloaded = plain("learner.ranks=2", "learner.backend=zero2", "learner.offload=optimizer")
    assert differing_keys(offloaded, plain()) == []
