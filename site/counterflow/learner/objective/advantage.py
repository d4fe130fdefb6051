"""From the task's rewards to an advantage for each token: baselines, and the KL term that sits in the reward.

The shaped reward exists only inside an update, because its estimator is of the current weights: one stored with the
trajectory would push pi away from mu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kl import token_kl
from .numerics import at_least_float32
from .ratios import log_weights, truncated
from .segments import sum_after, sum_before, sum_from, sum_segments
from .spec import ObjectiveSpec
from .types import PolicyBatch

_SMALLEST_DEVIATION = 1e-6
"""Added to a group's standard deviation, as GRPO does."""


def token_penalties(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """beta sg(KL estimator_t) of the current log-probs: float [tokens], detached, 0 outside the mask."""
    if spec.beta == 0:
        return torch.zeros_like(at_least_float32(batch.logprobs.detach()))
    return spec.beta * token_kl(batch, spec).detach()


def shaped_rewards(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """R'_i = R_i - min_{j in group} R_j - beta sum_t sg(KL_t), the whole return: float64 [sequences], detached.

    Rewards may be a million times their penalties: the group's lowest is taken off first, so that what equal rewards
    leave is the penalties themselves, not their rounding.
    """
    _, index, size = torch.unique(batch.group, return_inverse=True, return_counts=True)
    above = _above_lowest(batch.rewards.detach().double(), index, size.shape[0])
    return above - sum_segments(token_penalties(batch, spec).double(), batch.sequence, batch.sequences)


def has_company(group: Tensor) -> Tensor:
    """Bool [sequences]: the group holds at least one other sequence."""
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    return torch.gt(size[index], 1)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = R_i - mean_{j != i in group} R_j: float [sequences] (RLOO; Kool et al. 2019, Ahmadian et al. 2402.14740).

    `group` is int64 [sequences], any numbers; groups may differ in size. A group of one has no baseline of its own:
    its advantage is 0, so it carries no gradient. Equal rewards give exactly 0, without rounding noise.
    """
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    above = _above_lowest(rewards, index, size.shape[0])
    others = sum_segments(above, index, size.shape[0])[index] - above
    advantage = above - others / (size[index] - 1).clamp(min=1)
    return torch.where(has_company(group), advantage, 0.0)


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = R_i - mean_{j in group} R_j, itself included: float [sequences] (Dr. GRPO, 2503.20783).

    In the mean it is RLOO's times (1 - 1/G), for the reward and the KL in it alike.
    """
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    above = _above_lowest(rewards, index, size.shape[0])
    mean: Tensor = sum_segments(above, index, size.shape[0])[index] / size[index]
    return above - mean


def group_std(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = (R_i - mean) / (standard deviation of the group + 1e-6): float [sequences] (GRPO, 2402.03300).

    Feed it task rewards only: a group of equal rewards gives exactly 0, where shaped ones would give KL noise of unit
    variance whatever beta is.
    """
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    centred = group_mean(rewards, group)
    variance = sum_segments(centred.square(), index, size.shape[0]) / (size - 1).clamp(min=1)
    deviation: Tensor = variance.sqrt()[index] + _SMALLEST_DEVIATION
    return centred / deviation


def advantages(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """A_t for each token: float [tokens], detached; the KL in the reward is part of it if it has no weight of its own.

    Formed in float64, where squares and differences of the largest float32 rewards are finite.

    The KL is that of all tokens, or with `reward_to_go` without the penalties that y_t cannot change, under the same
    baseline. Both have the same mean gradient, `reward_to_go` with less variance, under sequence weights or token
    weights, uncapped. Without weights, under a cap or a geometric mean the past k1 no longer averages out, and the two
    differ: rows 4, 6 and 7 of the catalogue cover both.
    """
    rewards, dtype = batch.rewards.detach().double(), at_least_float32(batch.logprobs.detach()).dtype
    together = spec.kl_in_reward and spec.reward_weight == "importance"
    if together and spec.advantage in ("rloo", "group_mean"):
        # The baseline of the sum is exactly 0 where rewards and penalties are equal; the sum of baselines only nearly.
        estimate = leave_one_out if spec.advantage == "rloo" else group_mean
        whole = estimate(shaped_rewards(batch, spec), batch.group)[batch.sequence]
        return (whole + _share(batch, spec) * _unchargeable(batch, spec, token_penalties(batch, spec))).to(dtype)
    match spec.advantage:
        case "rloo":
            task = leave_one_out(rewards, batch.group)
        case "group_mean":
            task = group_mean(rewards, batch.group)
        case "group_std":
            task = group_std(rewards, batch.group)
        case "plain":
            task = rewards - spec.baseline
    by_token = task[batch.sequence]
    return (by_token - charged(batch, spec) if together else by_token).to(dtype)


def charged(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """The KL that each token answers for, less its baseline: float [tokens], detached, unweighted.

    The baseline is leave-one-out (for `group_mean` with its factor 1 - 1/G on all), or none (`plain`).
    """
    penalties = token_penalties(batch, spec)
    whole = sum_segments(penalties, batch.sequence, batch.sequences)
    charge = (whole - _baseline(batch, spec, whole))[batch.sequence] - _unchargeable(batch, spec, penalties)
    return _share(batch, spec) * charge


def weighted_charge(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """What multiplies g_t for a KL in the reward that has a weight of its own: float [tokens], detached.

    none, token, prefix, sequence, geometric: min(w_t, C) times `charged`. `per_decision`: sum_{n >= t} w_n KL_n with
    w_n = min(W_<=n, C), whatever `reward_to_go` is: each token's KL is weighted by the chance of reaching it, so the
    mean is exact with less variance than W; its baseline is taken with w_t. A KL of the state s_n has W_<n and n > t.
    """
    if spec.reward_weight == "none" or spec.reward_weight == "importance":
        charge = charged(batch, spec)
    elif spec.reward_weight == "per_decision":
        of_state = spec.estimator == "rao_blackwell"
        weight = truncated(log_weights(batch, "prefix", of_state=of_state), spec.kl_cap)
        penalties = weight * token_penalties(batch, spec)
        whole = sum_segments(penalties, batch.sequence, batch.sequences)
        to_go = (sum_after if of_state else sum_from)(penalties, batch.sequence, batch.sequences)
        reached = truncated(log_weights(batch, "prefix"), spec.kl_cap)
        charge = _share(batch, spec) * (to_go - reached * _baseline(batch, spec, whole)[batch.sequence])
    else:
        charge = truncated(log_weights(batch, spec.reward_weight), spec.kl_cap) * charged(batch, spec)
    return torch.where(batch.loss_mask, charge, 0.0)


def zero_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """Bool [groups]: the task rewards of the group are all equal, so that the task teaches nothing there."""
    distinct, index = torch.unique(group, return_inverse=True)
    empty = rewards.new_zeros(distinct.shape[0])
    lowest = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return lowest == highest


def _above_lowest(rewards: Tensor, index: Tensor, count: int) -> Tensor:
    lowest = rewards.new_zeros(count).scatter_reduce(0, index, rewards, "amin", include_self=False)
    return rewards - lowest[index]


def _baseline(batch: PolicyBatch, spec: ObjectiveSpec, whole: Tensor) -> Tensor:
    if spec.advantage == "plain":
        return torch.zeros_like(whole)
    return whole - leave_one_out(whole, batch.group)


def _share(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """What the baseline leaves of a charge, float [tokens]: 1, or 1 - 1/G with the group mean, or 0 for one alone."""
    tokens = at_least_float32(batch.logprobs.detach())
    if spec.advantage == "plain":
        return torch.ones_like(tokens)
    _, index, size = torch.unique(batch.group, return_inverse=True, return_counts=True)
    own = size[index][batch.sequence].to(tokens.dtype)
    return 1 - 1 / own if spec.advantage == "group_mean" else torch.gt(own, 1).to(tokens.dtype)


def _unchargeable(batch: PolicyBatch, spec: ObjectiveSpec, penalties: Tensor) -> Tensor:
    """The penalties that y_t cannot change, float [tokens]; 0 with the whole return."""
    if not spec.reward_to_go:
        return torch.zeros_like(penalties)
    past = sum_before(penalties, batch.sequence, batch.sequences)
    if spec.estimator == "rao_blackwell":
        past = past + penalties
    return past
