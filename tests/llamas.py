"""Random Llamas for tests, small enough to train and to serve on a CPU in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.models import sums_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def save_llama(folder: Path, **shape: Any) -> LlamaForCausalLM:
    """Write a random Llama, and a tokenizer of one token a character, to `folder`; returns the model.

    Args:
        shape: as `LlamaConfig` takes it; the vocabulary is the tokenizer's where it is not given.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = sums_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    options = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, **shape}
    model = LlamaForCausalLM(LlamaConfig(**options))
    model.save_pretrained(folder)
    return model
