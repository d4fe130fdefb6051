"""From the task's rewards to an advantage for each token: the KL term is added here, then the baseline is taken.

The shaped reward exists only inside an update, because its k1 is of the current weights: one stored with the
trajectory would push pi away from mu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kl import k1
from .types import ObjectiveSpec, PolicyBatch, at_least_float32, sum_before, sum_segments


def token_penalties(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """beta sg(k1_t), k1 of the current log-probs: float [tokens], detached, 0 outside the mask."""
    if spec.beta == 0:
        return torch.zeros_like(at_least_float32(batch.logprobs.detach()))
    if batch.reference_logprobs is None:
        raise ValueError(f"beta is {spec.beta} but the batch has no reference_logprobs; compute them, or set beta to 0")
    return spec.beta * k1(batch.logprobs.detach(), batch.reference_logprobs.detach(), batch.loss_mask)


def shaped_rewards(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """R'_i = R_i - beta sum_t sg(k1_t), the whole return: float [sequences], detached."""
    penalties = sum_segments(token_penalties(batch, spec), batch.sequence, batch.sequences)
    return at_least_float32(batch.rewards.detach()) - penalties


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
    count = size.shape[0]
    lowest = rewards.new_zeros(count).scatter_reduce(0, index, rewards, "amin", include_self=False)
    above = rewards - lowest[index]
    others = sum_segments(above, index, count)[index] - above
    advantage = above - others / (size[index] - 1).clamp(min=1)
    return torch.where(has_company(group), advantage, 0.0)


def advantages(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """A_t for each token: float [tokens], detached.

    `kl_return` whole: A_t = A_i = R'_i - mean_{j != i} R'_j, plain RLOO. `to_go`: A_t = A_i + beta sum_{n < t} k1_n,
    the same baseline without the penalties that y_t cannot change. Both have the same mean gradient, `to_go` with less
    variance, under sequence weights or token weights, uncapped. Without weights, or under a cap, the past k1 no longer
    averages out, and the two differ: rows 3 and 4 of the catalogue are `to_go`, row 6 is `whole`.
    """
    whole = leave_one_out(shaped_rewards(batch, spec), batch.group)[batch.sequence]
    if spec.kl_return == "whole":
        return whole
    past = sum_before(token_penalties(batch, spec), batch.sequence, batch.sequences)
    return whole + torch.where(has_company(batch.group)[batch.sequence], past, 0.0)


def zero_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """Bool [groups]: the task rewards of the group are all equal, so that the task teaches nothing there."""
    distinct, index = torch.unique(group, return_inverse=True)
    empty = rewards.new_zeros(distinct.shape[0])
    lowest = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return lowest == highest
