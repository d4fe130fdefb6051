"""Log-probs and entropies of chosen tokens from hidden states, a chunk of tokens at a time.

The [tokens, vocabulary] matrix never exists whole, in forward or backward: a chunk is computed again when its gradient
is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    hidden: Tensor, head: torch.nn.Linear, targets: Tensor, temperature: float, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Natural log-probs of `targets` and entropies (detached), both float32 [tokens].

    Args:
        hidden: [tokens, hidden], the state that predicts each target.
        head: maps hidden states to logits over the vocabulary.
        targets: int64 [tokens].
        temperature: divides the logits, as in sampling.
        chunk_tokens: tokens computed at once; by default so many that a chunk has 16 Mi logits.
    """
    vocabulary = head.weight.shape[0]
    size = chunk_tokens or max(_CHUNK_ELEMENTS // vocabulary, 1)
    pieces = [
        _chunk(hidden[at : at + size], head, targets[at : at + size], temperature)
        if hidden.shape[0] <= size or not torch.is_grad_enabled()
        else checkpoint(_chunk, hidden[at : at + size], head, targets[at : at + size], temperature, use_reentrant=False)
        for at in range(0, hidden.shape[0], size)
    ]
    if not pieces:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(hidden: Tensor, head: torch.nn.Linear, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropies
