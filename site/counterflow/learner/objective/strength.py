"""beta over the steps of a run: fixed, moved along a line, or steered to keep a measured KL at a target.

Pure functions from one step's numbers to the next beta; whoever keeps the run keeps the number.
"""

from __future__ import annotations

import math


def linear_beta(step: int, start: float, end: float, steps: int) -> float:
    """beta after `step` optimizer steps: from `start` at 0 along a line to `end` at `steps`, and `end` after that."""
    share = min(max(step / steps, 0.0), 1.0)
    return start + (end - start) * share


def adaptive_beta(beta: float, measured_kl: float, target_kl: float, horizon_steps: float) -> float:
    """The next beta: beta (1 + clip(measured / target - 1, -0.2, 0.2) / horizon) (Ziegler et al. 1909.08593).

    Rises while KL(pi || ref) is above the target, by at most 20 % / `horizon_steps` a step, and falls below it.
    A measurement that is not a number leaves beta as it is. Both KLs are in nats per token.
    """
    error = measured_kl / target_kl - 1
    if math.isnan(error):
        return beta
    return beta * (1 + min(max(error, -0.2), 0.2) / horizon_steps)
