"""The loss of a batch: a score function with constant weights and advantages, and the KL term where it is not in them.

A loss is a sum over tokens over a number fixed for the step, so the gradients of microbatches of whole groups add up
to the gradient of the step, whatever the split.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .advantage import advantages, weighted_charge
from .importance import correct
from .kl import token_kl
from .numerics import at_least_float32
from .ratios import log_weights, sequence_tokens, truncated
from .spec import ObjectiveSpec, Reduction
from .types import PolicyBatch


def token_losses(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """l_t = -sg(w_t A_t) log pi(y_t | s_t) and the KL terms beside it, times the token's share: float [tokens].

    Exactly 0 outside the mask.

    An infinite or NaN log-prob inside the mask gives a loss that is not finite: it is bad data, and it shows.
    """
    batch = _widened(batch)
    advantage = advantages(batch, spec)
    scale = -correct(batch, spec, advantage).weight * advantage
    if spec.kl_in_reward and spec.reward_weight != "importance":
        scale = scale + weighted_charge(batch, spec)
    losses = scale * torch.where(batch.loss_mask, batch.logprobs, 0.0)
    if spec.kl_in_loss:
        losses = losses + spec.beta * kl_in_loss(batch, spec)
    if spec.reduction == "sequence_mean":
        losses = losses / sequence_tokens(batch).clamp(min=1)[batch.sequence]
    return losses if batch.share is None else losses * batch.share


@torch.no_grad()
def token_weights(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """How much each token counts in the loss, up to one factor for all: float [tokens], 0 where cut or masked.

    The weight w_t of its gradient in `token_losses` and its share, over the length of its sequence for
    `sequence_mean`. Neither the advantage nor the weights of a KL term beside it count.
    """
    batch = _widened(batch)
    weight = correct(batch, spec, advantages(batch, spec)).weight.abs()
    if spec.reduction == "sequence_mean":
        weight = weight / sequence_tokens(batch).clamp(min=1)[batch.sequence]
    return weight if batch.share is None else weight * batch.share


def _widened(batch: PolicyBatch) -> PolicyBatch:
    """One cast for all uses, so that the gradients of the terms add up before they are rounded to half precision."""
    divergence = batch.reference_divergence
    return replace(
        batch,
        logprobs=at_least_float32(batch.logprobs),
        reference_divergence=None if divergence is None else at_least_float32(divergence),
    )


def kl_in_loss(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """w_t KL_t, differentiated through KL_t and, if the spec says so, through w_t: float [tokens].

    The full-vocabulary KL depends on s_t alone, so its weight is that of the state: 1 for `token`, W_<t for `prefix`.
    """
    estimate = token_kl(batch, spec)
    if spec.loss_weight == "none":
        return estimate
    of_state = spec.estimator == "rao_blackwell"
    log_weight = log_weights(batch, spec.loss_weight, spec.differentiate_weight, of_state)
    return truncated(log_weight, spec.kl_cap) * estimate


def normalizer(reduction: Reduction, sequences: int, tokens: int, length_constant: int) -> float:
    """What the step's sum of losses is divided by, from the whole step's counts.

    constant: sequences x length constant, unbiased up to scale. sequence_mean: sequences, each loss being divided by
    its own length already. token_mean: tokens, which depends on what was sampled. Both of these are biased.
    """
    match reduction:
        case "constant":
            return float(max(sequences, 1) * length_constant)
        case "sequence_mean":
            return float(max(sequences, 1))
        case "token_mean":
            return float(max(tokens, 1))


def policy_loss(batch: PolicyBatch, spec: ObjectiveSpec, divisor: float) -> Tensor:
    """L = sum_t l_t / divisor: a scalar to minimise; -grad L estimates grad (E[R] - beta KL(pi || ref)), scaled.

    `divisor` is the `normalizer` of the whole step, the same for all its microbatches.
    """
    if not (divisor > 0 and math.isfinite(divisor)):
        raise ValueError(f"divisor is {divisor}; pass the normalizer of the whole step")
    return token_losses(batch, spec).sum() / divisor
