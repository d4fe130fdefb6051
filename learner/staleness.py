"""Staleness policies: what becomes of tokens that are past the lag bound when they are to be trained.

Lags of a response's tokens flow in, a share a token flows out: what is left of its loss, and so of its gradient. Pure
functions on numpy arrays, which live runs and the simulator share. `drop` acts before, when a batch is chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from counterflow.buffer.trajectory import BoolArray
from counterflow.weight_sync.lag import Versions

Policy = Literal["wait", "drop", "mask_tokens", "withhold_keep_baseline", "downweight"]
Order = Literal["admission", "ready", "freshest"]
Shares = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rule:
    """A policy and its bound."""

    policy: Policy
    max_lag: float
    """In versions; inf is never passed."""
    decay: float = 0.5
    """`downweight`: factor a version past the bound."""

    @property
    def keeps_bound(self) -> bool:
        """Whether no token past the bound is ever trained."""
        return self.policy != "downweight"

    def dropped_past(self, order: Order) -> float:
        """The lag past which groups read in this order are dropped; inf where none is.

        Under `wait` admission keeps the bound in admission order alone: in others a group may be overtaken.
        """
        drops = self.policy == "drop" or (self.policy == "wait" and order != "admission")
        return self.max_lag if drops else math.inf


def shares(lags: Versions, mask: BoolArray, rule: Rule) -> Shares:
    """What the rule leaves of the loss of each token of one response, float32 [tokens], between 0 and 1.

    Args:
        lags: int64 [tokens].
        mask: bool [tokens]: the tokens that count; a lag outside is never looked at.
    """
    past = np.where(mask, np.maximum(lags - rule.max_lag, 0), 0)
    left: Shares = np.ones(past.shape, np.float32)
    match rule.policy:
        case "mask_tokens":
            left[past > 0] = 0
        case "withhold_keep_baseline":
            left[:] = not past.any()
        case "downweight":
            left[:] = rule.decay**past
        case "wait" | "drop":
            pass
    return left
