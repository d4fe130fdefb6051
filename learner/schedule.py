"""The learning rate of each step: a pure function of how many were taken before it, so that nothing needs saving."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, schedule: Schedule, last_step: int, floor: float = 0.0
) -> float:
    """The rate of the optimizer step that follows `step` others.

    Args:
        peak: the rate after the warm-up, which rises linearly and reaches it with its last step.
        schedule: what follows: `constant`, or a fall, `linear` or by half a `cosine`, that ends at the last step.
        last_step: how many steps the fall counts on; after them the rate stays where it is.
        floor: where the fall ends, as a share of the peak.
    """
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return peak
    done = min((step - warmup_steps + 1) / max(last_step - warmup_steps, 1), 1.0)
    left = 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return peak * (floor + (1.0 - floor) * left)
