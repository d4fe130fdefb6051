"""Where the randomness of a deterministic run's responses comes from: pure functions of what timing cannot move."""

from __future__ import annotations

import random


def group_seed(run_seed: int, admission: int) -> int:
    """The seed of a group's first sample; the i-th has this + i."""
    # A string seed goes through SHA-512, so that neighbouring groups and runs share nothing.
    return random.Random(f"samples {run_seed} {admission}").getrandbits(62)


def turn_seed(run_seed: int, admission: int, sample: int, turn: int) -> int:
    """The seed of one turn of a group's sample."""
    return random.Random(f"turn {run_seed} {admission} {sample} {turn}").getrandbits(62)
