"""Corrections of the policy gradient for data of mu: each a weight w_t, so that its gradient is sum_t w_t A_t g_t.

Weights are constants of the loss. A clipped objective min(ratio A, clip(ratio) A) has the gradient of weight `ratio`
where it is not clipped and 0 where it is, and is written as that weight. Every correction also says where it acted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import masked_difference
from .ratios import log_ratios, log_weights, truncated
from .segments import sum_after, sum_through
from .spec import ObjectiveSpec
from .types import PolicyBatch


class Weights(NamedTuple):
    """What a correction makes of each token."""

    weight: Tensor
    """Float [tokens], detached, 0 or more."""
    changed: Tensor
    """Bool [tokens]: the ratio was capped, clipped or masked here."""


def capped(log_weight: Tensor, cap: float) -> Weights:
    """min(w, C) (TIS, Ionides 2008); an infinite C is plain importance sampling. `log_weight` float [tokens]."""
    return Weights(truncated(log_weight, cap), log_weight > math.log(cap))


def masked(log_weight: Tensor, floor: float, cap: float) -> Weights:
    """w inside [floor, cap], 0 outside (IcePop; masked importance sampling). `log_weight` float [tokens]."""
    weight = truncated(log_weight, math.inf)
    outside = (weight < floor) | (weight > cap)
    return Weights(torch.where(outside, 0.0, weight), outside)


def ppo_clipped(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Weights:
    """Gradient weight of min(rho A, clip(rho, 1 - low, 1 + high) A) (Schulman et al. 1707.06347): float [tokens]."""
    ratio = truncated(log_ratio, math.inf)
    outside = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    return Weights(torch.where(outside, 0.0, ratio), outside)


def decoupled_clipped(
    log_proximal_ratio: Tensor, log_ratio: Tensor, advantage: Tensor, cap: float, clip_low: float, clip_high: float
) -> Weights:
    """min(pi_prox/mu, C) times PPO's clip on pi/pi_prox (AReaL, 2505.24298): float [tokens].

    Args:
        log_proximal_ratio: log(pi_prox / mu).
        log_ratio: log(pi / pi_prox).
    """
    behind, ahead = capped(log_proximal_ratio, cap), ppo_clipped(log_ratio, advantage, clip_low, clip_high)
    return Weights(behind.weight * ahead.weight, behind.changed | ahead.changed)


def cispo(log_ratio: Tensor, clip_low: float, clip_high: float) -> Weights:
    """clip(rho, 1 - low, 1 + high), which never drops a token (MiniMax-M1, 2506.13585): float [tokens]."""
    ratio = truncated(log_ratio, math.inf)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Weights(weight, weight != ratio)


def topr(log_sequence_weight: Tensor, advantage: Tensor, cap: float) -> Weights:
    """1 where the advantage is not negative, min(W, C) where it is (TOPR, 2503.14286, has C = 1): float [tokens]."""
    weight, beyond = capped(log_sequence_weight, cap)
    return Weights(torch.where(advantage >= 0, 1.0, weight), beyond & (advantage < 0))


def second_moment_masked(log_ratio: Tensor, group: Tensor, mask: Tensor, limit: float) -> Weights:
    """rho, the tokens of largest log^2 rho masked until their group's mean of it is at most `limit`: float [tokens].

    M2PO (2510.01161) takes the mean over the batch; here it is over a group, which no split of a batch divides.
    `group` is int64 [tokens], `mask` bool [tokens].
    """
    moment = log_ratio.double().square()
    candidates = mask.nonzero().squeeze(-1)
    ascending = candidates[torch.argsort(moment[candidates], stable=True)]
    ordered = ascending[torch.argsort(group[ascending], stable=True)]
    distinct, index = torch.unique(group[ordered], return_inverse=True)
    total = sum_through(moment[ordered], index, distinct.shape[0])
    rank = sum_through(torch.ones_like(total), index, distinct.shape[0])
    dropped = torch.zeros_like(mask)
    dropped[ordered] = total > limit * rank
    return Weights(torch.where(dropped, 0.0, truncated(log_ratio, math.inf)), dropped)


def far_negatives_masked(clipped: Weights, log_mean_ratio: Tensor, advantage: Tensor, limit: float) -> Weights:
    """`clipped`, without negative sequences of which mean log(mu / pi) passes `limit` (DeepSeek-V3.2, 2512.02556).

    `log_mean_ratio` float [tokens] is log W / T of each token's sequence.
    """
    dropped = (advantage < 0) & (-log_mean_ratio > limit)
    return Weights(torch.where(dropped, 0.0, clipped.weight), clipped.changed | dropped)


def double_capped(
    log_ratio: Tensor, mask: Tensor, sequence: Tensor, sequences: int, cap: float, trace_cap: float
) -> Weights:
    """min(rho_t, C) prod_{n>t} min(rho_n, C'), in the manner of V-trace (IMPALA, 1802.01561): float [tokens].

    A token counts as far as mu's continuation of it is what pi would have written; states stay those of mu.
    """
    own = log_ratio.clamp(max=math.log(cap))
    later = torch.where(mask, log_ratio.clamp(max=math.log(trace_cap)), 0.0)
    weight = truncated(own + sum_after(later, sequence, sequences), math.inf)
    return Weights(weight, mask & ((own != log_ratio) | (later != log_ratio)))


def correct(batch: PolicyBatch, spec: ObjectiveSpec, advantage: Tensor) -> Weights:
    """The spec's correction. Outside the mask the weight is exactly 0 and nothing has changed.

    `advantage` float [tokens], detached, is read by corrections that treat good and bad tokens apart.
    """
    weight, changed = _correct(batch, spec, advantage)
    return Weights(torch.where(batch.loss_mask, weight, 0.0), changed & batch.loss_mask)


def weight_left(spec: ObjectiveSpec) -> float:
    """The mean weight of ratios 0.01 % from 1, for advantages of either sign: near 1, unless bounds cut nearly all.

    Two tokens a sequence, so that bounds of later tokens act too.
    """
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = 1e-4 * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64).repeat_interleave(2)
    sequence = torch.arange(4).repeat_interleave(2)
    nothing = torch.zeros_like(logprobs)
    batch = PolicyBatch(
        logprobs, nothing, None, logprobs, torch.ones(8, dtype=torch.bool), sequence, signs, torch.zeros(4).long()
    )
    return correct(batch, spec, signs[sequence]).weight.mean().item()


def _correct(batch: PolicyBatch, spec: ObjectiveSpec, advantage: Tensor) -> Weights:
    ratio = log_ratios(batch)
    match spec.correction:
        case "none":
            return Weights(torch.ones_like(ratio), torch.zeros_like(batch.loss_mask))
        case "importance":
            return capped(log_weights(batch, spec.level), math.inf)
        case "truncated":
            return capped(log_weights(batch, spec.level), spec.cap)
        case "masked":
            return masked(log_weights(batch, spec.level), spec.floor, spec.cap)
        case "ppo":
            return ppo_clipped(ratio, advantage, spec.clip_low, spec.clip_high)
        case "decoupled_ppo":
            if batch.proximal_logprobs is None:
                raise ValueError("decoupled_ppo needs PolicyBatch.proximal_logprobs")
            proximal = batch.proximal_logprobs.detach()
            behind = masked_difference(proximal, batch.behavior_logprobs.detach(), batch.loss_mask)
            ahead = masked_difference(batch.logprobs.detach(), proximal, batch.loss_mask)
            return decoupled_clipped(behind, ahead, advantage, spec.cap, spec.clip_low, spec.clip_high)
        case "cispo":
            return cispo(ratio, spec.clip_low, spec.clip_high)
        case "gspo":
            # The ratio of the whole sequence in the place of each token's (Zheng et al. 2507.18071, GSPO-token).
            return ppo_clipped(log_weights(batch, "geometric"), advantage, spec.clip_low, spec.clip_high)
        case "topr":
            return topr(log_weights(batch, "sequence"), advantage, spec.cap)
        case "m2po":
            return second_moment_masked(ratio, batch.group[batch.sequence], batch.loss_mask, spec.second_moment)
        case "sequence_mask":
            clipped = ppo_clipped(ratio, advantage, spec.clip_low, spec.clip_high)
            return far_negatives_masked(clipped, log_weights(batch, "geometric"), advantage, spec.divergence)
        case "vtrace":
            return double_capped(ratio, batch.loss_mask, batch.sequence, batch.sequences, spec.cap, spec.trace_cap)
