"""Log-probs and entropies of chosen tokens, and the KL of whole vocabularies, from hidden states, a tile at a time.

The [tokens, vocabulary] matrix never exists whole, in forward or backward: a tile's logits are computed again when
its gradient is needed, and its gradient is folded into those of hidden states and head at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterflow.learner.liger import cross_entropy_kernel, liger_logprobs
from counterflow.learner.tiled_softmax import tiled_softmax

_CPU_TILE = (512, 1024)
"""Tokens and vocabulary of a tile whose logits and their exponentials stay in a core's cache."""
_GPU_TILE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Projection:
    """The last layer: logits = (hidden weight^T + bias) / temperature, of which each row is one token's."""

    hidden: Tensor
    """[tokens, hidden], the state that predicts each token."""
    head: torch.nn.Module
    """Its `weight` [vocabulary, hidden] and its `bias` [vocabulary], if any, make the logits."""

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the head."""
        bias = getattr(self.head, "bias", None)
        return self.head.weight, bias if isinstance(bias, Tensor) else None  # type: ignore[return-value]


@dataclass(frozen=True)
class TokenStatistics:
    """What the objective needs of each token's distribution. Float32 [tokens], float64 for float64 hidden states."""

    logprobs: Tensor
    """Natural log-prob of the target."""
    entropies: Tensor
    """Entropy in nats."""
    divergences: Tensor | None
    """KL(pi || ref) in nats over the whole vocabulary; None without a reference. No gradient reaches the reference."""


def token_logprobs(
    hidden: Tensor, head: torch.nn.Module, targets: Tensor, temperature: float, tile: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Natural log-probs of `targets`, and entropies (detached), both float32 [tokens]; see `token_statistics`.

    On GPUs where Liger is installed its cross-entropy kernel makes the log-probs.
    """
    if hidden.is_cuda and tile is None:
        kernel = cross_entropy_kernel()
        if kernel is not None:
            return liger_logprobs(kernel, hidden, head, targets, temperature)
    found = token_statistics(Projection(hidden, head), targets, temperature, tile=tile)
    return found.logprobs, found.entropies.detach()


def token_statistics(
    policy: Projection,
    targets: Tensor,
    temperature: float,
    reference: Projection | None = None,
    tile: tuple[int, int] | None = None,
) -> TokenStatistics:
    """Log-prob of each target, entropy, and full-vocabulary KL from the reference, all differentiable in the policy.

    Args:
        targets: int64 [tokens].
        temperature: divides the logits, as in sampling.
        reference: the frozen reference at the same tokens.
        tile: tokens and vocabulary computed at once; by default what suits the device.
    """
    weight, bias = policy.parameters
    frozen = None
    if reference is not None:
        reference_weight, reference_bias = reference.parameters
        frozen = (reference.hidden.detach(), reference_weight.detach(), _detached(reference_bias))
    logprobs, entropies, divergences = tiled_softmax(
        policy.hidden, weight, bias, targets, float(temperature), tile or _tile(weight), frozen
    )
    return TokenStatistics(logprobs, entropies, None if reference is None else divergences)


def _tile(weight: Tensor) -> tuple[int, int]:
    if weight.device.type == "cpu":
        return _CPU_TILE
    return max(_GPU_TILE_ELEMENTS // weight.shape[0], 1), weight.shape[0]


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()
