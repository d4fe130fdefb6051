"""Fixtures shared by all tests: a real server, groups to put on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from groups import make_group
from hypothesis import HealthCheck, settings
from llamas import save_llama

from counterflow.buffer.connection import Address
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.trajectory import Group, Origin

# No test may depend on the time it takes: machines are shared.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """One real server for the whole session; every test takes a run of its own on it."""
    with EmbeddedServer(tmp_path_factory.mktemp("buffer"), timeout_s=20) as server:
        yield server.address


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    """The origin of a run that no other test uses."""
    return Origin(run_id=tmp_path.name, model_fingerprint="model", tokenizer_fingerprint="tokenizer", sampling="{}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random Llama of 0.6 M parameters and a tokenizer of one token a character."""
    folder = tmp_path_factory.mktemp("tiny-model")
    save_llama(
        folder,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=384,
        max_position_embeddings=128,
    )
    return folder


@pytest.fixture
def group() -> Group:
    """A group of two trajectories of three tokens."""
    return make_group()
