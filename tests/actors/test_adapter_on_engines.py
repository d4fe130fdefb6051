"""An adapter travels alone, by every transport, and each engine samples from its base with exactly that adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from counterflow.actors.generation import Completion
from counterflow.cluster import process_environment
from counterflow.configs.schema import RunConfig
from counterflow.learner.learner import _layout
from counterflow.learner.lora import adapt, trained_weights
from counterflow.learner.policy import load_model
from counterflow.weight_sync.fingerprint import prove
from counterflow.weight_sync.transports import open_publisher

pytest.importorskip("peft")
PROMPT = [3, 4, 5, 6]
TRANSPORTS = ["shared_memory", "disk", "gloo", "shared_memory"]


def configured(model: Path, engine: str, transport: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model, "context_length": 128},
            "sampling": {"max_tokens": 40},
            "admission": {"samples_per_group": 4},
            "actors": {"engine": engine, **({"kv_cache_bytes": 64 << 20} if engine == "vllm" else {})},
            "learner": {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj", "down_proj"]}},
            "weight_sync": {"transport": transport},
        }
    )


def gap(model: Any, completion: Completion) -> float:
    ids = torch.tensor([PROMPT + completion.token_ids.tolist()])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits.float(), -1)
    at = len(PROMPT)
    found = logprobs[0, at - 1 : -1].gather(-1, ids[0, at:, None]).squeeze(-1).numpy()
    return float(np.abs(found - completion.logprobs).max())


async def start(config: RunConfig) -> Any:
    if config.actors.engine == "vllm":
        from counterflow.actors.vllm_engine import VllmEngine

        return await VllmEngine.start(config)
    from counterflow.actors.transformers_engine import TransformersEngine

    return await TransformersEngine.start(config)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_engine_samples_from_another_adapter_than_was_published(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    for name, value in process_environment(cpus=1, gpus=0).items():
        monkeypatch.setenv(name, value)
    config = configured(tiny_model, engine, "shared_memory")
    model, lora = load_model(config, torch.device("cpu")), config.learner.lora
    assert lora is not None
    adapt(model, lora)
    layout = _layout(config, model)

    async def main() -> list[float]:
        served = await start(config)
        try:
            await served.connect_weights("actor 0", layout)
            gaps = [max(gap(model, completion) for completion in await served.sample(PROMPT))]
            for version, transport in enumerate(TRANSPORTS, 1):
                with torch.no_grad():
                    for _, tensor in trained_weights(model):
                        tensor.add_(torch.randn_like(tensor) * 0.2)
                publisher = open_publisher(configured(tiny_model, engine, transport), layout, tmp_path)
                try:
                    staged = publisher.stage(version, 0, trained_weights(model))
                    loading = asyncio.create_task(served.load(publisher.prepare(staged, ["actor 0"])))
                    sent = await asyncio.to_thread(publisher.send, staged)
                    prove("actor 0", sent, await loading)
                    await served.serve(version)
                finally:
                    publisher.close()
                completions = await served.sample(PROMPT)
                assert all(span.version == version for c in completions for span in c.version_spans)
                gaps.append(max(gap(model, completion) for completion in completions))
            return gaps
        finally:
            served.shutdown()

    before = [tensor.clone() for _, tensor in trained_weights(model)]
    gaps = asyncio.run(main())
    print(f"{engine}: {layout.total_bytes:,} bytes a version; gaps {gaps}")
    assert max(gaps) < 1e-4
    assert all((new - old).norm() > 0.1 for (_, new), old in zip(trained_weights(model), before, strict=True))
