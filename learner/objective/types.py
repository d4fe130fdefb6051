"""What flows through the objective: a batch of tokens, and what is measured of it.

The layout is flat: the tokens of whole sequences of whole groups lie one after the other, so a batch may be split at
any group boundary. The order of sequences within `rewards` and `group` is the one that `sequence` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyBatch:
    """Log-probs of sampled tokens under up to four distributions, with the rewards of their sequences.

    Log-probs may be float64, float32 or a half precision; computation is in float32, or float64 where given.
    Values of tokens outside `loss_mask` are never read, whatever they are.
    """

    logprobs: Tensor
    """Float [tokens]: log pi(y_t | s_t), current policy; carries gradient."""
    behavior_logprobs: Tensor
    """Float [tokens]: log mu(y_t | s_t), of the distribution that the token was sampled from."""
    reference_logprobs: Tensor | None
    """Float [tokens]: log ref(y_t | s_t); may be None only where beta is 0."""
    proximal_logprobs: Tensor | None
    """Float [tokens]: log pi_prox(y_t | s_t), weights at the start of the step, for methods that use it."""
    loss_mask: Tensor
    """Bool [tokens]: the response tokens that the policy sampled."""
    sequence: Tensor
    """Int64 [tokens]: index of each token's sequence, non-decreasing."""
    rewards: Tensor
    """Float [sequences]: the task's own rewards, never shaped."""
    group: Tensor
    """Int64 [sequences]: equal for the sequences of one prompt; any numbers."""
    reference_divergence: Tensor | None = None
    """Float [tokens]: sum_v pi(v | s_t) log (pi / ref)(v | s_t), for `rao_blackwell`; carries gradient."""
    share: Tensor | None = None
    """Float [tokens], constant: what is left of each token's loss, 1 or less, by a policy for stale or truncated
    samples. It touches nothing else: ratios, KL to go, baselines and divisors are those of all tokens. None: 1."""

    def __post_init__(self) -> None:
        for name in (
            "behavior_logprobs",
            "reference_logprobs",
            "proximal_logprobs",
            "loss_mask",
            "sequence",
            "reference_divergence",
            "share",
        ):
            value = getattr(self, name)
            if value is not None and value.shape != self.logprobs.shape:
                raise ValueError(
                    f"PolicyBatch.{name} has shape {list(value.shape)}; it needs {list(self.logprobs.shape)}, "
                    "one entry for each entry of logprobs"
                )
        if self.logprobs.dim() != 1 or self.rewards.dim() != 1 or self.group.shape != self.rewards.shape:
            raise ValueError(
                f"PolicyBatch needs flat tensors: logprobs {list(self.logprobs.shape)}, "
                f"rewards {list(self.rewards.shape)}, group {list(self.group.shape)}; pass [tokens] and [sequences]"
            )
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"PolicyBatch.loss_mask is {self.loss_mask.dtype}; convert it with .bool()")

    @property
    def trained(self) -> Tensor:
        """Bool [tokens]: those of the mask of whose loss anything is left."""
        return self.loss_mask if self.share is None else self.loss_mask & (self.share > 0)

    @property
    def sequences(self) -> int:
        """Number of sequences, empty ones included."""
        return self.rewards.shape[0]


@dataclass(frozen=True)
class Diagnostics:
    """What one step's data says of the distance between the policies. Tokens are those of the mask."""

    kl_reference: float
    """KL(pi || ref) by k3, mean over tokens, nats; NaN where there are no reference log-probs."""
    kl_behavior_k1: float
    """KL(mu || pi) by k1 = log mu - log pi, mean over tokens, nats."""
    kl_behavior_k3: float
    """KL(mu || pi) by k3 = rho - 1 - log rho, mean over tokens, nats."""
    ess_token: float
    """(sum rho)^2 / (N sum rho^2) over the N tokens, in (0, 1]."""
    ess_sequence: float
    """The same of W over sequences."""
    chi2: float
    """Mean of rho^2 over tokens, less 1."""
    truncated_weights: float
    """Share of tokens whose weight or ratio the correction changed: capped, clipped or masked."""
    zero_signal_groups: float
    """Share of groups whose task rewards, before shaping, are all equal."""
    lone_sequences: float
    """Share of sequences alone in their group: of no baseline, so that only `plain`, or a KL in the loss, uses them."""
    bounded_exponents: float
    """Number of tokens with an exponent so large that it was bounded, or so small that its weight is 0."""


def concatenate(batches: Sequence[PolicyBatch]) -> PolicyBatch:
    """The microbatches of a step as one detached batch; sequences and groups are renumbered, no group spans two."""
    sequences, groups, sequence_offset, group_offset = [], [], 0, 0
    for batch in batches:
        distinct, dense = torch.unique(batch.group, return_inverse=True)
        sequences.append(batch.sequence + sequence_offset)
        groups.append(dense + group_offset)
        sequence_offset += batch.sequences
        group_offset += distinct.shape[0]

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor.detach() for tensor in tensors if tensor is not None]
        return torch.cat(present) if len(present) == len(tensors) else None

    return PolicyBatch(
        logprobs=torch.cat([batch.logprobs.detach() for batch in batches]),
        behavior_logprobs=torch.cat([batch.behavior_logprobs for batch in batches]),
        reference_logprobs=joined([batch.reference_logprobs for batch in batches]),
        proximal_logprobs=joined([batch.proximal_logprobs for batch in batches]),
        loss_mask=torch.cat([batch.loss_mask for batch in batches]),
        sequence=torch.cat(sequences),
        rewards=torch.cat([batch.rewards for batch in batches]),
        group=torch.cat(groups),
        reference_divergence=joined([batch.reference_divergence for batch in batches]),
        share=joined([batch.share for batch in batches]),
    )
