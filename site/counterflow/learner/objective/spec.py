"""The choice of objective: where the KL term sits, how off-policy data is corrected, what the baseline is.

One frozen dataclass of plain values, the only thing besides tensors that the mathematics reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Correction = Literal[
    "none",
    "importance",
    "truncated",
    "masked",
    "ppo",
    "decoupled_ppo",
    "cispo",
    "gspo",
    "topr",
    "m2po",
    "sequence_mask",
    "vtrace",
]
Level = Literal["token", "prefix", "sequence", "geometric"]
Estimator = Literal["k1", "k2", "k3", "rao_blackwell"]
Placement = Literal["reward", "loss", "both"]
RewardWeight = Literal["importance", "none", "token", "prefix", "per_decision", "sequence", "geometric"]
LossWeight = Literal["none", "token", "prefix", "sequence"]
Advantage = Literal["rloo", "group_mean", "group_std", "plain"]
Reduction = Literal["constant", "sequence_mean", "token_mean"]


@dataclass(frozen=True)
class ObjectiveSpec:
    """Which objective is optimised. rho_t = pi/mu of a token, W_<=t its product so far, W over the whole sequence."""

    beta: float
    """Strength of KL(pi || ref); 0 leaves it out."""
    correction: Correction = "truncated"
    """How the advantage is corrected for data of mu; see `importance`."""
    level: Level = "token"
    """Which ratio `importance`, `truncated` and `masked` weight by: rho_t, W_<=t, W or W^(1/T)."""
    cap: float = 2.0
    """Upper bound of a weight; inf does not truncate."""
    floor: float = 0.5
    """`masked`: weights below it become 0."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """`ppo`, `decoupled_ppo`, `cispo`, `gspo`, `sequence_mask`: ratios are clipped to [1 - clip_low, 1 + clip_high]."""
    trace_cap: float = 1.0
    """`vtrace`: upper bound of the ratios of later tokens."""
    second_moment: float = 0.04
    """`m2po`: most that the mean of log^2 rho over a group's tokens may be; the furthest tokens are masked."""
    divergence: float = 0.1
    """`sequence_mask`: mean log(mu/pi) over a sequence past which it is masked, if its advantage is negative."""
    estimator: Estimator = "k1"
    """KL estimator of a token."""
    placement: Placement = "reward"
    """Where the estimator sits."""
    reward_to_go: bool = True
    """Whether a token answers for its own and later tokens' KL, or for that of its whole sequence."""
    reward_weight: RewardWeight = "importance"
    """Weight of the KL in the reward; `importance`: part of the advantage, weighted as the task's reward is."""
    loss_weight: LossWeight = "none"
    """Weight of the KL in the loss."""
    differentiate_weight: bool = True
    """Whether the weight of the KL in the loss carries gradient."""
    kl_cap: float = math.inf
    """Upper bound of the KL term's own weights."""
    advantage: Advantage = "rloo"
    """Baseline of a reward."""
    baseline: float = 0.0
    """`plain`: the number taken from every task reward."""
    reduction: Reduction = "constant"
    """What a sum over tokens is divided by; all but `constant` are biased."""

    def __post_init__(self) -> None:
        if not (self.beta >= 0 and math.isfinite(self.beta)):
            raise ValueError(f"ObjectiveSpec.beta is {self.beta}; it needs a finite number, 0 or more")
        for name in ("cap", "kl_cap", "trace_cap", "second_moment"):
            if not getattr(self, name) > 0:
                raise ValueError(f"ObjectiveSpec.{name} is {getattr(self, name)}; it needs a number above 0, or inf")
        if self.correction == "masked" and not 0 <= self.floor <= 1 <= self.cap:
            raise ValueError(f"ObjectiveSpec.floor {self.floor} and cap {self.cap} must stand on either side of 1")
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise ValueError(
                f"ObjectiveSpec.clip_low is {self.clip_low}, clip_high {self.clip_high}; "
                "they need numbers of 0 or more, clip_low at most 1"
            )

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL term is part of the return."""
        return self.beta > 0 and self.placement in ("reward", "both")

    @property
    def kl_in_loss(self) -> bool:
        """Whether a KL term is differentiated."""
        return self.beta > 0 and self.placement in ("loss", "both")

    @property
    def shrinks_kl(self) -> bool:
        """Whether the baseline takes its share, 1/G in a group of G, from the KL in the reward, and from it alone."""
        return self.kl_in_reward and self.advantage == "group_mean"

    @property
    def needs_proximal(self) -> bool:
        """Whether the log-probs of the weights at the start of the step are read."""
        return self.correction == "decoupled_ppo"

    @property
    def needs_divergence(self) -> bool:
        """Whether the full-vocabulary KL of each state is read."""
        return self.beta > 0 and self.estimator == "rao_blackwell"
