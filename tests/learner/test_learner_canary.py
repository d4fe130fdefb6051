"""The learner's half of a canary, on a real model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from counterflow.buffer.trajectory import Group, Trajectory, VersionSpan
from counterflow.learner.canary import measure
from counterflow.learner.policy import Policy

TEMPERATURE = 0.7
PROMPT = np.array([3, 4, 5], np.int32)


def group_by(model: torch.nn.Module, temperature: float, version: int = 2) -> Group:
    """A group whose log-probs are the model's own, computed without the project."""
    trajectories = []
    for seed in range(3):
        response = np.random.default_rng(seed).integers(3, 9, size=4 + seed).astype(np.int32)
        ids = torch.tensor([[*PROMPT.tolist(), *response.tolist()]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits.float() / temperature, -1)[0, len(PROMPT) - 1 : -1]
        behavior = logprobs.gather(-1, ids[0, len(PROMPT) :, None]).squeeze(-1).numpy()
        spans = (VersionSpan(version, 0, len(response)),)
        trajectories.append(Trajectory(response, behavior, spans, 0.0, "stop"))
    return Group("canary/0", 0, 0, PROMPT, tuple(trajectories), 1, 2)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def policy(model: torch.nn.Module) -> Policy:
    return Policy(model, None, TEMPERATURE, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("tokens", [8, 10_000])
def test_engine_that_agrees_has_a_gap(model: torch.nn.Module, tokens: int) -> None:
    gap = measure(policy(model), [group_by(model, TEMPERATURE)], 2, tokens, 0)
    assert gap.tokens == 4 + 5 + 6
    assert gap.mean < 1e-5 and gap.largest < 1e-4 < gap.at_temperature_1


def test_engine_at_another_temperature_has_none(model: torch.nn.Module) -> None:
    gap = measure(policy(model), [group_by(model, 1.0)], 2, 10_000, 0)
    assert gap.at_temperature_1 < 1e-5 < 1e-2 < gap.mean


def test_response_of_another_version_is_compared(model: torch.nn.Module) -> None:
    good, other = group_by(model, TEMPERATURE), group_by(model, 3.0, version=1)
    mixed = dataclasses.replace(good, trajectories=(*good.trajectories[:1], *other.trajectories))
    assert measure(policy(model), [mixed], 2, 10_000, 0).tokens == 4
    with pytest.raises(ValueError, match="no response of version 2"):
        measure(policy(model), [other], 2, 10_000, 0)
