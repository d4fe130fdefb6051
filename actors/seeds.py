"""Where the randomness of a deterministic run's responses comes from: pure functions of what timing cannot move."""

from __future__ import annotations

import random


def group_seed(run_seed: int, admission: int) -> int:
    """The seed of a group's first sample; the i-th has this + i."""
    # A string seed goes through SHA-512, so that neighbouring groups and runs share nothing.
    return random.Random(f"samples {run_seed} {admission}").getrandbits(62)
