"""Canaries: what the gap is made of, when it stops a run, and whom it blames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from counterflow.configs.schema import RunConfig
from counterflow.errors import WeightSyncError
from counterflow.weight_sync.canary import CanaryWatch, Gap


def gap(mean: float, **changed: Any) -> Gap:
    return Gap(**{"tokens": 9, "mean": mean, "largest": 2 * mean, "signed": 0.0, "at_temperature_1": 1.0, **changed})


def test_gap_forgets_signs_or_the_temperature() -> None:
    engine, learner = np.array([-1.0, -2.0, -4.0], np.float32), np.array([-1.5, -1.75, -4.0], np.float32)
    found = Gap.between(engine, learner, engine - 3)
    assert (found.tokens, found.mean, found.largest) == (3, 0.25, 0.5)
    assert (found.signed, found.at_temperature_1) == (pytest.approx(0.25 / 3), 3.0)


def test_noise_of_the_usual_size_stops_the_run() -> None:
    watch = CanaryWatch(RunConfig())
    for version, mean in enumerate((1e-6, 3e-6, 0.009, 1e-6)):
        watch.look("actor 0", version, gap(mean))
    rough = CanaryWatch(RunConfig())
    for version, mean in enumerate((0.02, 0.05, 0.19)):
        rough.look("actor 0", version, gap(mean))


@pytest.mark.parametrize("mean", [0.02, 5.0, float("nan")])
def test_jump_passes(mean: float) -> None:
    watch = CanaryWatch(RunConfig())
    watch.look("actor 0", 0, gap(1e-6))
    watch.look("actor 1", 0, gap(1e-3))
    with pytest.raises(WeightSyncError, match=r"actor 0 .* version 25: .* 1e-06 before") as raised:
        watch.look("actor 0", 25, gap(mean))
    assert raised.value.receivers == ("actor 0",)


@pytest.mark.parametrize(
    ("options", "measured", "words"),
    [
        ({"sampling": {"temperature": 0.6}}, {"at_temperature_1": 1e-6}, "sampling.temperature 0.6 is left out"),
        ({"sampling": {"top_p": 0.8}}, {"signed": 0.2}, "sampling.top_p 0.8 .* cuts the engine's support"),
        ({"actors": {"dtype": "bfloat16"}}, {}, "actors.dtype bfloat16 against learner.dtype float32"),
        ({"weight_sync": {"recompute": False}}, {}, "cache of older weights"),
        ({}, {}, "changed the engine's weights only in part"),
    ],
)
def test_likely_cause_is_left_out(options: dict[str, Any], measured: dict[str, float], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        CanaryWatch(RunConfig.model_validate(options)).look("actor 0", 0, gap(0.3, **measured))
    # And the others are not named.
    with pytest.raises(WeightSyncError) as raised:
        CanaryWatch(RunConfig()).look("actor 0", 0, gap(0.3))
    assert "temperature" not in str(raised.value) and "support" not in str(raised.value)
