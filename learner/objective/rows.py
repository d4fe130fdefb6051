"""What a choice of objective really is: its row in the catalogue, its expected gradient, whether that is the KL's.

In flows an `ObjectiveSpec` and whether the data is pi's own, out flow words and a verdict. The expected gradients hold
for the KL term at beta 1, on samples of mu, and are checked against the loss itself by enumeration.

G = grad KL(pi || ref); R_d and F_d = the reverse and the forward KL of each state, states drawn from d and frozen;
S_pi = grad E_pi[sum_t k2_t].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .importance import weight_left
from .row_words import (
    ESTIMATORS,
    PLACES,
    WEIGHTS,
    expected_in_words,
    formula,
    reason,
    shrunk_formula,
    weighting_in_words,
)
from .spec import ObjectiveSpec

_LITTLE = 2 / 3
"""A mean weight below it, of ratios next to 1, is worth a warning."""

Combination = Mapping[str, float]
"""A sum of named vector fields with their factors; {} is 0."""
Part = Combination | None
"""The reward's or the loss's share of an expected gradient; None where it has no closed form."""


@dataclass(frozen=True)
class Row:
    """A choice of the KL term, named for what it is."""

    row: str
    """Its name in the catalogue, `off_1` to `on_k3_both`; `none` without a KL term; `unlisted` where it has no name."""
    what: str
    """What is computed, in words."""
    expected: str
    """The expected gradient, as a formula or in words."""
    combination: Combination | None
    """The expected gradient as a sum of named fields; None where it is none, or depends on the group's size too."""
    biased: bool
    """Whether it is something else than grad KL(pi || ref)."""
    why: str
    """One sentence."""


def classify(spec: ObjectiveSpec, on_policy: bool = False) -> Row:
    """The row of a spec, on data of mu, or on data of pi itself."""
    if spec.beta == 0:
        return Row("none", "no KL term", "0", {}, False, "beta is 0: nothing pulls to the reference.")
    kind, capped = reward_weighting(spec)
    at_one, loss_at_one = _left_of_one(spec)
    reward, loss = _parts(spec, on_policy)
    uncut = replace(spec, kl_cap=math.inf, cap=math.inf, trace_cap=math.inf)
    if on_policy:
        moving = spec.kl_in_loss and spec.loss_weight != "none" and spec.differentiate_weight
        cut = (spec.kl_in_reward and at_one != 1) or (spec.kl_in_loss and loss_at_one != 1)
        name = f"on_{spec.estimator}_{spec.placement}"
        row = name if name in _ON_POLICY and not moving and not cut else "unlisted"
        weights = "on-policy, where a bound below 1 cuts every weight" if cut else "on-policy"
    else:
        row = _off_policy_row(spec, kind, capped)
        cut = spec.kl_in_reward and capped and kind == "sequence"
        weights = weighting_in_words(spec, kind, capped)
    combination = None if reward is None or loss is None else _sum(reward, loss)
    exact = _expression(spec, reward, loss)
    limit = None if exact is not None else _expression(uncut, *_parts(uncut, on_policy))
    plain = replace(uncut, advantage="plain")
    if spec.reduction != "constant" or spec.shrinks_kl:
        combination = None
    return Row(
        row=row,
        what=f"{ESTIMATORS[spec.estimator]} in {PLACES[spec.placement]}, {weights}",
        expected=expected_in_words(spec, row, exact, limit, at_one or 1.0),
        combination=combination,
        biased=combination != {"G": 1.0},
        why=reason(spec, row, _expression(plain, *_parts(plain, on_policy)), limit, cut),
    )


def correction_weighting(spec: ObjectiveSpec) -> tuple[str, bool]:
    """Which ratio the correction weights by (`none`, `token`, ..., or a name of its own), and whether it cuts it."""
    if spec.correction in ("none", "topr", "vtrace"):
        return spec.correction, False
    if spec.correction in ("ppo", "cispo", "m2po", "sequence_mask", "decoupled_ppo"):
        return "token", True
    if spec.correction == "gspo":
        return "geometric", True
    bounded = not math.isinf(spec.cap)
    cuts = {"truncated": bounded, "masked": bounded or spec.floor > 0}.get(spec.correction, False)
    return spec.level, cuts


def reward_weighting(spec: ObjectiveSpec) -> tuple[str, bool]:
    """The same for the KL in the reward, which may have a weight of its own."""
    if spec.reward_weight == "importance":
        return correction_weighting(spec)
    return spec.reward_weight, spec.reward_weight != "none" and not math.isinf(spec.kl_cap)


def cautions(spec: ObjectiveSpec, on_policy: bool) -> list[str]:
    """What else of the choice bends the gradient, beside the KL term: one sentence each."""
    found = []
    if spec.reduction == "sequence_mean":
        found.append("Reduction sequence_mean is biased: 1/|y| depends on the sample, so short responses weigh more.")
    if spec.reduction == "token_mean":
        found.append("Reduction token_mean is biased: it divides by a number of tokens that depends on the samples.")
    if spec.advantage == "group_mean":
        found.append("Advantage group_mean leaves 1 - 1/G of the reward and of a KL in it, but a KL in the loss whole.")
    if spec.advantage == "group_std":
        found.append(
            "Advantage group_std divides the task's reward by its spread in the group, so very easy and very hard "
            "prompts weigh more; the KL term is added after that, at its own scale."
        )
    kind, cuts = correction_weighting(spec)
    if on_policy and _correction_at_one(spec) != 1:
        found.append("The task's own gradient is cut even on-policy: a cap of the correction is below 1.")
    if (left := weight_left(spec)) < _LITTLE:
        found.append(
            f"Bounds of the correction leave {left:.3g} of the task's gradient even where ratios are nearly 1."
        )
    if not on_policy and (kind != "sequence" or cuts):
        weighted = "without weights" if kind == "none" else f"weighted by {WEIGHTS[kind]}" + (", cut" if cuts else "")
        found.append(f"The task's own gradient ({weighted}) is biased off-policy.")
    return found


def sampling_caution(top_p: float, top_k: int, spec: ObjectiveSpec) -> str | None:
    """The bias of truncated sampling: mu's support is smaller than pi's, so that E_mu[rho] falls short of 1."""
    own = (spec.kl_in_reward and spec.reward_weight not in ("importance", "none")) or (
        spec.kl_in_loss and spec.loss_weight != "none"
    )
    if (top_p >= 1 and top_k <= 0) or (spec.correction == "none" and not own):
        return None
    what = " and ".join(([f"top_p {top_p:g}"] if top_p < 1 else []) + ([f"top_k {top_k}"] if top_k > 0 else []))
    # The nucleus is the fewest tokens that reach top_p; of top_k nothing is known but by measuring.
    size = f"between {top_p:g} and 1 a token" if top_p < 1 and top_k <= 0 else "below 1"
    return (
        f"Sampling with {what} and importance weights is biased: tokens that were cut off are never sampled, so "
        f"E_mu[rho_t] is the probability that pi gives to the tokens that were kept, {size} and not 1, and what the "
        "others would teach is missing. Set sampling.top_p to 1 and sampling.top_k to 0, or leave out the weights."
    )


def on_cut_support(row: Row) -> Row:
    """The row where top-p or top-k cut mu's support: no weight brings back what is never sampled, so it is biased."""
    if row.row == "none":
        return row
    return replace(
        row,
        expected=f"{row.expected}, but for what top_p or top_k cut off",
        combination=None,
        biased=True,
        why=f"{row.why} Tokens that top_p or top_k cut off are never sampled, and miss from every mean.",
    )


def refusal(row: Row) -> str | None:
    """Why `strict_kl` refuses the choice, and what to do; None if it does not."""
    if not row.biased:
        return None
    return (
        f"it refuses row {row.row} ({row.what}): its expected gradient is {row.expected}, "
        f"not grad KL(pi || ref). {row.why} Use estimator k1, placement reward, reward_weight per_decision, "
        "kl.cap inf, advantage rloo, reduction constant, top_p 1 and top_k 0; or set it to false."
    )


_ON_POLICY = (
    "on_k1_reward",
    "on_k3_reward",
    "on_k1_loss",
    "on_k2_loss",
    "on_k3_loss",
    "on_k1_both",
    "on_k3_both",
)


def _correction_at_one(spec: ObjectiveSpec) -> float | None:
    """What the correction makes of the ratio 1; None where that depends on the token."""
    if spec.correction in ("truncated", "decoupled_ppo"):
        return min(spec.cap, 1.0)
    if spec.correction == "vtrace":
        return min(spec.cap, 1.0) if spec.trace_cap >= 1 else None
    return None if spec.correction == "topr" and spec.cap < 1 else 1.0


def _left_of_one(spec: ObjectiveSpec) -> tuple[float | None, float]:
    """What bounds leave of a weight of 1, in the reward and in the loss; None where it is no one number."""
    own = min(spec.kl_cap, 1.0)
    in_reward = {"importance": _correction_at_one(spec), "none": 1.0}.get(spec.reward_weight, own)
    return in_reward, 1.0 if spec.loss_weight == "none" else own


def _parts(spec: ObjectiveSpec, on_policy: bool) -> tuple[Part, Part]:
    reward: Part = {}
    loss: Part = {}
    if on_policy:
        # Ratios are 1 but for the engine's numerics: what acts is a bound below 1, and the gradient of a ratio.
        at_one, loss_at_one = _left_of_one(spec)
        if spec.kl_in_reward:
            reward = _scaled(_reward_part(spec, "sequence", capped=False), at_one)
        if spec.kl_in_loss:
            loss = _scaled(_on_policy_loss(spec), loss_at_one)
        return reward, loss
    if spec.kl_in_reward:
        reward = _reward_part(spec, *reward_weighting(spec))
    if spec.kl_in_loss:
        loss = _loss_part(spec)
    return reward, loss


def _expression(spec: ObjectiveSpec, reward: Part, loss: Part) -> str | None:
    if reward is None or loss is None:
        return None
    return shrunk_formula(reward, loss) if spec.shrinks_kl else formula(_sum(reward, loss))


def _scaled(part: Part, factor: float | None) -> Part:
    return None if part is None or factor is None else {field: factor * own for field, own in part.items()}


def _sum(*parts: Combination) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for field, factor in part.items():
            total[field] = total.get(field, 0.0) + factor
    return {field: factor for field, factor in total.items() if factor}


def _reward_part(spec: ObjectiveSpec, kind: str, capped: bool) -> Part:
    if capped or kind not in ("sequence", "per_decision"):
        return None
    return {
        "k1": {"G": 1.0},
        "k2": {"S_pi": 1.0, "R_pi": -1.0},
        "k3": {"G": 1.0, "F_pi": -1.0},
        "rao_blackwell": {"G": 1.0, "R_pi": -1.0},
    }[spec.estimator]


def _on_policy_loss(spec: ObjectiveSpec) -> Part:
    if spec.loss_weight == "none" or not spec.differentiate_weight:
        spec = replace(spec, loss_weight="prefix", differentiate_weight=False)
    combination = _loss_part(replace(spec, kl_cap=math.inf))
    return None if combination is None else _sum(*({_on(field): factor} for field, factor in combination.items()))


def _on(field: str) -> str:
    return field.replace("_mu", "_pi")


def _loss_part(spec: ObjectiveSpec) -> Part:
    estimator, weight = spec.estimator, spec.loss_weight
    if weight != "none" and not math.isinf(spec.kl_cap):
        return None
    if weight == "none":
        return {"k1": {"K_mu_pi": -1.0}, "rao_blackwell": {"R_mu": 1.0}}.get(estimator)
    if weight == "token":
        if spec.differentiate_weight:
            return {"k1": {"R_mu": 1.0}, "k3": {"R_mu": 1.0}, "rao_blackwell": {"R_mu": 1.0}}.get(estimator)
        return {"k1": {}, "k2": {"R_mu": 1.0}, "k3": {"F_mu": 1.0}, "rao_blackwell": {"R_mu": 1.0}}[estimator]
    if spec.differentiate_weight:
        return {"k1": {"G": 1.0}, "k2": {"S_pi": 1.0}, "k3": {"G": 1.0}, "rao_blackwell": {"G": 1.0}}[estimator]
    return {"k1": {}, "k2": {"R_pi": 1.0}, "k3": {"F_pi": 1.0}, "rao_blackwell": {"R_pi": 1.0}}[estimator]


def _off_policy_row(spec: ObjectiveSpec, kind: str, capped: bool) -> str:
    estimator = spec.estimator
    if spec.placement == "reward":
        if estimator == "k1":
            if kind == "token" and not spec.reward_to_go and capped:
                return "unlisted"
            named = {"sequence": 6 if capped else 1, "per_decision": 2, "token": 3, "none": 4, "geometric": 7}
            return f"off_{named[kind]}" if kind in named else "unlisted"
        return "off_8" if estimator == "k3" and kind == "sequence" else "unlisted"
    weight, moving = spec.loss_weight, spec.differentiate_weight
    if spec.placement == "both":
        listed = estimator in ("k1", "k3") and kind == "sequence" and weight == "prefix" and not moving
        return f"off_18_{estimator}" if listed else "unlisted"
    rows = {
        ("k1", "none"): 9,
        ("k2", "none"): 10,
        ("k3", "none"): 11,
        ("k3", "token", True): 12,
        ("k2", "token", False): 12,
        ("k1", "token", True): 13,
        ("k2", "token", True): 14,
        ("k2", "prefix", False): 15,
        ("k1", "prefix", True): 16,
        ("k3", "prefix", True): 17,
    }
    key = (estimator, weight) if weight == "none" else (estimator, weight, moving)
    return f"off_{rows[key]}" if key in rows else "unlisted"
