"""How far apart the policies are, from one step's tokens: plain floats, measured in float64 and without gradient.

Feed it the whole step at once (`concatenate`): effective sample sizes of microbatches do not average.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .advantage import advantages, has_company, zero_signal
from .importance import correct
from .kl import k1, k3
from .numerics import at_least_float32, largest_exponent
from .ratios import effective_sample_share, log_ratios, log_weights, sequence_log_ratios
from .spec import Level, ObjectiveSpec
from .types import Diagnostics, PolicyBatch


def mean_or_zero(values: Tensor) -> Tensor:
    """Mean of [n], 0 for n = 0."""
    return values.sum() / max(values.shape[0], 1)


def bounded_exponents(batch: PolicyBatch, spec: ObjectiveSpec) -> Tensor:
    """Bool [tokens]: an exponent of the loss was bounded here, or so small that its weight is 0.

    That is rho or a running product of it, where it is a weight, and ref / pi in k3.
    """
    dtype = at_least_float32(batch.logprobs).dtype
    bound, least = largest_exponent(dtype), math.log(torch.finfo(dtype).tiny)
    bounded = torch.zeros_like(batch.loss_mask)
    levels: set[Level] = {spec.level} if spec.correction in ("importance", "truncated", "masked") else set()
    if spec.kl_in_reward and spec.reward_weight != "importance" and spec.reward_weight != "none":
        levels.add("prefix" if spec.reward_weight == "per_decision" else spec.reward_weight)
    if spec.kl_in_loss and spec.loss_weight != "none":
        levels.add(spec.loss_weight)
    if spec.correction != "none":
        levels.add("sequence" if spec.correction == "topr" else "token")
    for level in levels:
        exponent = log_weights(batch, level)
        bounded |= (exponent > bound) | (exponent < least)
    if spec.beta and spec.estimator == "k3" and batch.reference_logprobs is not None:
        bounded |= -k1(batch.logprobs, batch.reference_logprobs, batch.loss_mask) > bound
    return bounded & batch.loss_mask


@torch.no_grad()
def diagnose(batch: PolicyBatch, spec: ObjectiveSpec) -> Diagnostics:
    """Distances between mu, pi and ref over the tokens of the mask, and what the correction and the rewards look like.

    Means are over tokens as mu sampled them, unweighted. So k3 against ref is unbiased for KL(pi || ref) per token
    only on-policy; it is never negative, and it is not the estimator that the gradient uses.
    """
    by_token = log_ratios(batch).double()[batch.loss_mask]
    by_sequence = sequence_log_ratios(batch).double()
    ratio = by_token.clamp(max=largest_exponent(torch.float64)).exp()
    if batch.reference_logprobs is None:
        kl_reference = torch.full_like(ratio.sum(), math.nan)
    else:
        kl_reference = mean_or_zero(
            k3(batch.logprobs.double(), batch.reference_logprobs.double(), batch.loss_mask)[batch.loss_mask]
        )
    changed = correct(batch, spec, advantages(batch, spec)).changed[batch.loss_mask]
    measured = torch.stack(
        [
            kl_reference,
            mean_or_zero(-by_token),
            mean_or_zero(ratio - 1 - by_token),
            effective_sample_share(by_token),
            effective_sample_share(by_sequence),
            mean_or_zero(ratio.square() - 1),
            mean_or_zero(changed.double()),
            mean_or_zero(zero_signal(batch.rewards, batch.group).double()),
            mean_or_zero(1 - has_company(batch.group).double()),
            bounded_exponents(batch, spec).double().sum(),
        ]
    )
    return Diagnostics(*measured.tolist())


def remarks(measured: Diagnostics, spec: ObjectiveSpec) -> list[str]:
    """What a person should know of a step whose numbers hide it: one sentence each, none for most steps."""
    found = []
    if measured.bounded_exponents:
        found.append(
            f"{measured.bounded_exponents:.0f} tokens had a ratio outside their precision, which was clamped or is 0: "
            "pi is far from mu or from the reference there"
        )
    if spec.advantage == "plain":
        return found
    if measured.lone_sequences:
        alone = "only the KL in the loss teaches there" if spec.kl_in_loss else "teach nothing"
        found.append(f"{measured.lone_sequences:.0%} of responses are alone in their group: {alone}")
    if measured.zero_signal_groups == 1:
        taught = "only the KL term teaches" if spec.beta else "nothing teaches"
        found.append(f"every group has equal task rewards: {taught}")
    return found
