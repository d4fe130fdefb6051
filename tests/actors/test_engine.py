"""The real engine under weight updates: every token's log-prob is that of the version on its span."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from live_engines import known, update
from transformers import AutoModelForCausalLM

from counterflow.cluster import process_environment
from counterflow.configs.schema import RunConfig
from counterflow.weight_sync.layout import lay_out, named_weights
from counterflow.weight_sync.publisher import Publisher
from counterflow.weight_sync.slots import Slots
from counterflow.weight_sync.transports import SharedMemory

UPDATES = 6
PROMPT = [3, 4, 5, 6]


def score(model: torch.nn.Module, token_ids: np.ndarray, temperature: float) -> np.ndarray:
    ids = torch.tensor([PROMPT + token_ids.tolist()])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits.float() / temperature, -1)
    at = len(PROMPT)
    return logprobs[0, at - 1 : -1].gather(-1, ids[0, at:, None]).squeeze(-1).numpy()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one: the path of a socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def sockets(folder: Path) -> list[Path]:
    return [path for inner in folder.iterdir() for path in inner.iterdir()]


def test_token_carries_a_version_that_did_not_sample_it(
    tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in process_environment(cpus=1, gpus=0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    from counterflow.actors.generation import Completion
    from counterflow.actors.vllm_engine import VllmEngine

    temperature = 0.7
    config = RunConfig.model_validate(
        {
            "model": {"path": tiny_model, "context_length": 128},
            "sampling": {"max_tokens": 100, "temperature": temperature},
            "admission": {"samples_per_group": 4},
            "actors": {"kv_cache_bytes": 64 << 20},
        }
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    layout = lay_out(named_weights(model), torch.float32)
    slots = Slots(layout)
    publisher = Publisher(slots, SharedMemory(slots))
    weights = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]

    async def main() -> tuple[list[Completion], list[Completion]]:
        engine = await VllmEngine.start(config)
        try:
            await engine.connect_weights("actor 0", layout)
            done: list[Completion] = []

            async def keep_asking() -> None:
                while engine.version < UPDATES:
                    done.extend(await engine.sample(PROMPT))

            load = [asyncio.create_task(keep_asking()) for _ in range(8)]
            for version in range(1, UPDATES + 1):
                # The next version lands in the middle of responses.
                enough = len(done) + 12
                while len(done) < enough:
                    await asyncio.sleep(0.01)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.02)
                weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
                staged = publisher.stage(version, version % 2, named_weights(model))
                await update(engine, publisher.prepare(staged, ["actor 0"]), known(publisher.send(staged)))
            await asyncio.gather(*load)
            # New requests for the same prompt, whose blocks an older version may have left in the prefix cache.
            after = await engine.sample(PROMPT)
            assert sockets(folder)
            return done, after
        finally:
            engine.shutdown()

    try:
        done, after = asyncio.run(main())
    finally:
        publisher.close()

    assert not list(folder.iterdir()) and os.environ["VLLM_RPC_BASE_PATH"] == str(folder)
    assert all(completion.finish_reason in {"stop", "length"} for completion in done)
    assert {span.version for completion in after for span in completion.version_spans} == {UPDATES}
    assert any(len(completion.version_spans) > 1 for completion in done)
    assert {span.version for completion in done for span in completion.version_spans} == set(range(UPDATES + 1))
    worst = 0.0
    for completion in done + after:
        for span in completion.version_spans:
            model.load_state_dict(weights[span.version])
            expected = score(model, completion.token_ids, temperature)
            gap = np.abs(expected - completion.logprobs)[span.start : span.end]
            worst = max(worst, float(gap.max(initial=0.0)))
    assert worst < 1e-4
