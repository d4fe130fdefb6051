"""Fixtures shared by all tests: a real server, groups to put on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from counterflow.buffer.connection import Address
from counterflow.buffer.server import embedded_server
from counterflow.buffer.trajectory import Group, Origin, Trajectory, VersionSpan
from counterflow.models import sums_tokenizer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """One real server for the whole session; every test takes a run of its own on it."""
    with embedded_server(tmp_path_factory.mktemp("buffer"), timeout_s=20) as address:
        yield address


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    """The origin of a run that no other test uses."""
    return Origin(run_id=tmp_path.name, model_fingerprint="model", tokenizer_fingerprint="tokenizer", sampling="{}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random Llama of 0.6 M parameters and a tokenizer of one token a character."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = sums_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=384,
            max_position_embeddings=128,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def group() -> Group:
    """A group of two trajectories of three tokens."""
    return make_group()


def make_group(admission: int = 0, samples: int = 2, tokens: int = 3, version: int = 0) -> Group:
    """A group whose numbers follow from its arguments."""
    return Group(
        group_id=f"group-{admission}",
        admission=admission,
        prompt_id=admission,
        prompt_token_ids=np.arange(4, dtype=np.int32),
        trajectories=tuple(
            Trajectory(
                response_token_ids=np.arange(tokens, dtype=np.int32) + i,
                behavior_logprobs=np.full(tokens, -0.5, np.float32),
                version_spans=(VersionSpan(version, 0, tokens),) if tokens else (),
                reward=float(i),
                finish_reason="stop",
            )
            for i in range(samples)
        ),
        started_at_us=1,
        finished_at_us=2,
    )
