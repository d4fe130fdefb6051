"""How much likelier pi finds what mu sampled: log-ratios of tokens, of what came before them, of whole sequences.

Differences of log-probs in float32 or float64, summed in float64; a log-ratio is bounded before it is exponentiated, so
that a weight and its square are finite. All are 0 (a weight of 1) outside the mask and for a sequence without tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .numerics import largest_exponent, masked_difference
from .segments import sum_before, sum_segments, sum_through
from .spec import Level
from .types import PolicyBatch


def log_ratios(batch: PolicyBatch, differentiable: bool = False) -> Tensor:
    """log rho_t = log pi(y_t | s_t) - log mu(y_t | s_t): float [tokens], detached unless `differentiable`."""
    logprobs = batch.logprobs if differentiable else batch.logprobs.detach()
    return masked_difference(logprobs, batch.behavior_logprobs.detach(), batch.loss_mask)


def sequence_tokens(batch: PolicyBatch) -> Tensor:
    """Int64 [sequences]: tokens of the mask in each sequence."""
    return sum_segments(batch.loss_mask.long(), batch.sequence, batch.sequences)


def sequence_log_ratios(batch: PolicyBatch) -> Tensor:
    """log W = sum_t log rho_t: float [sequences], detached, 0 (W = 1) for a sequence without tokens."""
    return sum_segments(log_ratios(batch), batch.sequence, batch.sequences)


def log_weights(batch: PolicyBatch, level: Level, differentiable: bool = False, of_state: bool = False) -> Tensor:
    """log rho_t, log W_<=t, log W or log W / T at each token: float [tokens].

    `of_state` leaves out y_t's own ratio, for what depends on s_t alone: `token` gives 0, `prefix` gives log W_<t.
    """
    ratios = log_ratios(batch, differentiable)
    if level == "token":
        return torch.zeros_like(ratios) if of_state else ratios
    if level == "prefix":
        running = sum_before if of_state else sum_through
        return running(ratios, batch.sequence, batch.sequences)
    whole = sum_segments(ratios, batch.sequence, batch.sequences)
    if level == "geometric":
        whole = whole / sequence_tokens(batch).clamp(min=1)
    return whole[batch.sequence]


def truncated(log_weight: Tensor, cap: float) -> Tensor:
    """w = min(exp(log_weight), cap), of any shape (truncated importance sampling).

    Its gradient is w grad log_weight, at the cap too: the cap bounds how much a sample counts, not whether it counts.
    Even with an infinite cap a weight stays below e^39.9 in float32 (e^319 in float64): its square must be finite.
    """
    constant = log_weight.detach()
    weight = constant.clamp(max=largest_exponent(constant.dtype)).exp().clamp(max=cap)
    return weight * (1 + log_weight - constant) if log_weight.requires_grad else weight


def effective_sample_share(log_weight: Tensor) -> Tensor:
    """ESS / N = (sum w)^2 / (N sum w^2) of log-weights [N], formed in logs so that it never overflows; 1 for N = 0.

    Tends to 1 / (1 + chi2) as N grows, with chi2 = E_mu[w^2] - 1.
    """
    count = log_weight.shape[0]
    if count == 0:
        return log_weight.new_ones(())
    doubled = 2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0)
    return torch.exp(doubled - math.log(count))


def learning_rate_scale(batch: PolicyBatch) -> float:
    """sqrt(ESS / N) of the step's unclipped W: what stale data leaves of the learning rate (VCPO, 2602.17616).

    ESS of on-policy data is N. Feed it the whole step.
    """
    return effective_sample_share(sequence_log_ratios(batch).double()).sqrt().item()
