"""What the learner maximises, and how far it trusts groups of other versions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from counterflow.configs.section import Section


class KLSection(Section):
    """The pull towards the reference."""

    beta: float = Field(0.001, ge=0, le=1e6, description="Strength of the KL term; 0 leaves it out.")
    estimator: Literal["k1", "k2", "k3", "rao_blackwell"] = Field(
        "k1",
        description="KL estimator per token: k1 = log pi - log ref, k2 = k1^2/2, k3 = ref/pi - 1 + k1, or "
        "rao_blackwell, the KL of the whole vocabulary at the token's context.",
    )
    placement: Literal["reward", "loss", "both"] = Field(
        "reward",
        description="Where the estimator sits: in the `reward`, where k1 is unbiased on data of pi itself or with the "
        "right weights; in the `loss`, which differentiates it; or in `both`.",
    )
    reward_to_go: bool = Field(
        True, description="Charge a token for its own and later tokens' KL; false: for that of its whole response."
    )
    reward_weight: Literal["importance", "none", "token", "prefix", "per_decision", "sequence", "geometric"] = Field(
        "importance",
        description="Weight of the KL in the reward: `importance` shares that of the task's reward; `per_decision` and "
        "`sequence` are exact off-policy for k1 with cap inf; `none`, `token`, `prefix` and `geometric` are not.",
    )
    loss_weight: Literal["none", "token", "prefix", "sequence"] = Field(
        "none",
        description="Weight of the KL in the loss: none, or the ratio pi/mu of the token, so far, or of the response.",
    )
    differentiate_weight: bool = Field(True, description="Let the gradient pass through the KL's weight in the loss.")
    cap: float = Field(
        float("inf"),
        gt=0,
        description="Upper bound of the KL's own weights, in reward and loss; `inf` does not truncate.",
    )
    schedule: Literal["fixed", "linear", "adaptive"] = Field(
        "fixed", description="beta over the run: `fixed`, `linear` from beta to beta_end, `adaptive` towards target."
    )
    beta_end: float = Field(0.0, ge=0, le=1e6, description="`linear`: beta after schedule_steps.")
    schedule_steps: int = Field(100, ge=1, description="`linear`: steps from beta to beta_end.")
    target: float = Field(
        0.01, gt=0, allow_inf_nan=False, description="`adaptive`: KL(pi || ref) to hold, in nats per token."
    )
    horizon_steps: float = Field(
        10.0, ge=1, allow_inf_nan=False, description="`adaptive`: beta changes by at most 20 % / this at a step."
    )
    reference_every: int = Field(
        0, ge=0, description="Versions after which the policy, as it is then, becomes the reference. 0: it never moves."
    )


class ImportanceSection(Section):
    """The correction from the behaviour to the current policy."""

    correction: Literal[
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
    ] = Field(
        "truncated",
        description="`truncated`: weights min(ratio, cap). `none`: no weights. `importance`: uncapped. `masked`: 0 "
        "outside floor and cap (IcePop). `ppo`: clipped. `decoupled_ppo`: min(prox/mu, cap) and a clip on pi/prox. "
        "`cispo`: clipped weights. `gspo`: clipped ratio of the response. `topr`: capped on negative advantages only. "
        "`m2po`: masked by second moment. `sequence_mask`: ppo without far negative responses (DeepSeek-V3.2). "
        "`vtrace`: cap on the token's ratio, trace_cap on later ones.",
    )
    level: Literal["token", "prefix", "sequence", "geometric"] = Field(
        "token",
        description="Ratio that `importance`, `truncated` and `masked` use: of one token, of the response so far, of "
        "the whole response, or the geometric mean over it.",
    )
    cap: float = Field(2.0, gt=0, description="Upper bound of a weight; `inf` does not truncate.")
    floor: float = Field(0.5, ge=0, le=1, description="`masked`: weights below it become 0.")
    clip_low: float = Field(
        0.2, ge=0, le=1, description="`ppo`, `cispo`, `gspo`, `sequence_mask`: ratios count down to 1 - this."
    )
    clip_high: float = Field(0.2, ge=0, description="The same: ratios count up to 1 + this.")
    trace_cap: float = Field(1.0, gt=0, description="`vtrace`: upper bound of the ratios of later tokens.")
    second_moment: float = Field(
        0.04, gt=0, description="`m2po`: the furthest tokens are masked until the mean of log^2 ratio is at most this."
    )
    divergence: float = Field(
        0.1, ge=0, description="`sequence_mask`: mean log(mu/pi) past which a negative response is masked, in nats."
    )
    scale_learning_rate: bool = Field(
        False, description="Multiply the learning rate by sqrt(ESS/N) of the step's whole-response weights (VCPO)."
    )


class ObjectiveSection(Section):
    """What the learner maximises: E[R] - beta KL(pi || ref)."""

    kl: KLSection = Field(default_factory=KLSection, description="The pull towards the reference.")
    importance: ImportanceSection = Field(default_factory=ImportanceSection, description="The off-policy correction.")
    advantage: Literal["rloo", "group_mean", "group_std", "plain"] = Field(
        "rloo",
        description="Baseline: `rloo`, the mean of the group's other samples; `group_mean`, itself included, which "
        "biases a KL in the reward; `group_std`, that over the group's spread of task rewards; `plain`, `baseline`.",
    )
    baseline: float = Field(0.0, allow_inf_nan=False, description="`plain`: what is taken from every task reward.")
    reduction: Literal["constant", "sequence_mean", "token_mean"] = Field(
        "constant",
        description="The sum over tokens is divided by a `constant`; `sequence_mean` (by each response's length) and "
        "`token_mean` (by the step's tokens) are biased.",
    )
    length_constant: int | None = Field(
        None, ge=1, description="`constant`: divides by sequences x this. Absent: `sampling.max_tokens`."
    )
    strict_kl: bool = Field(
        False, description="Refuse to start where the expected gradient of the KL term is not that of KL(pi || ref)."
    )
