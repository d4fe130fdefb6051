"""Bias and variance of on-policy KL gradients, far from the reference and near it, stand in the published order."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "figure1.py"


@pytest.fixture(scope="module")
def figure1():
    specification = importlib.util.spec_from_file_location("figure1", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def check(figure1, lengths, seeds):
    found = figure1.curves(lengths, seeds)
    for place in range(len(lengths)):

        def at(regime, row, quantity, place=place):
            return found[regime][row][quantity][place]

        for regime in ("independent", "near"):
            assert at(regime, "on_k1_reward", "bias") < 1e-9
            assert at(regime, "on_k3_both", "bias") < 1e-9
            assert at(regime, "on_k1_loss", "bias") == pytest.approx(1, abs=1e-9)
            for local in ("on_k2_loss", "on_k3_loss"):
                assert 0.01 < at(regime, local, "bias") < at(regime, "on_k3_reward", "bias")
        noise = {row: at("near", row, "variance") for row in figure1.ROWS}
        assert max(noise, key=noise.get) == "on_k1_loss"
        assert noise["on_k1_loss"] > 10 * noise["on_k1_reward"] > 10 * noise["on_k2_loss"] > 10 * noise["on_k3_reward"]
        assert at("near", "on_k3_reward", "bias") == pytest.approx(1, abs=0.1)
        noise = {row: at("independent", row, "variance") for row in figure1.ROWS}
        assert min(noise, key=noise.get) == "on_k2_loss"
        assert noise["on_k1_loss"] < noise["on_k3_loss"] < noise["on_k1_reward"]
    return found


def test_orderings_at_short_lengths(figure1, tmp_path):
    found = check(figure1, [5, 7], seeds=3)
    figure1.draw(found, [5, 7], tmp_path / "figure1.png")
    assert (tmp_path / "figure1.png").stat().st_size > 10_000


@pytest.mark.slow
def test_orderings_from_five_to_eleven_tokens(figure1):
    check(figure1, range(5, 12), seeds=5)
