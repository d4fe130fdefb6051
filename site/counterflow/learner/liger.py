"""Log-probs by the cross-entropy kernel of Liger, for GPUs where it is installed.

A chunk of tokens at a time: the kernel leaves the gradient in the place of the logits, and the chunk is computed again
when that is needed. Nothing here is imported unless a GPU asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Kernel = Callable[..., Tensor]
"""(logits [tokens, vocabulary], targets [tokens], reduction="none") -> -log p(target), float [tokens]."""
_CHUNK_ELEMENTS = 1 << 26


@cache
def cross_entropy_kernel() -> Kernel | None:
    """Liger's cross-entropy, or None where it is not installed."""
    try:
        functional = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    return functional.liger_cross_entropy  # type: ignore[no-any-return]


def liger_logprobs(
    kernel: Kernel, hidden: Tensor, head: torch.nn.Module, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` int64 [tokens] and entropies (detached), both float32 [tokens].

    `hidden` is [tokens, hidden]; `head` maps it to logits over the vocabulary, divided by `temperature`.
    """

    def chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float() / temperature
        with torch.no_grad():
            log_chance = torch.log_softmax(logits, dim=-1)
            entropies = -(log_chance.exp() * log_chance).sum(-1)
            del log_chance
        return -kernel(logits, chosen, reduction="none"), entropies

    size = max(_CHUNK_ELEMENTS // int(head.weight.shape[0]), 1)  # type: ignore[index]
    pieces = [
        checkpoint(chunk, hidden[at : at + size], targets[at : at + size], use_reentrant=False)
        for at in range(0, hidden.shape[0], size)
    ]
    if not pieces:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
