"""The engine of transformers alone: what it says of a token is what sampled it, whatever arrives meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from live_engines import CLOSE, LONG, SAMPLES, SHORT, Asker, Learner, make_model, name
from llamas import save_llama
from transformers import AutoModelForCausalLM

from counterflow.actors.generation import Completion
from counterflow.actors.transformers_engine import TransformersEngine
from counterflow.configs.schema import RunConfig
from counterflow.errors import WeightSyncError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


def settings(model: Path, samples: int = SAMPLES, sampling: dict[str, Any] | None = None, **sync: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model, "context_length": 256},
            "sampling": {"max_tokens": 40, "temperature": 0.8, **(sampling or {})},
            "admission": {"samples_per_group": samples},
            "actors": {"engine": "transformers"},
            "weight_sync": sync,
        }
    )


async def connected(config: RunConfig, learner: Learner) -> TransformersEngine:
    engine = await TransformersEngine.start(config)
    await engine.connect_weights(name(0), learner.layout)
    await learner.join(name(0), engine)
    return engine


@pytest.mark.parametrize(
    ("transport", "in_flight"),
    [
        ("shared_memory", "keep"),
        ("shared_memory", "wait"),
        ("shared_memory", "abort"),
        ("gloo", "keep"),
        ("disk", "keep"),
    ],
)
def test_token_carries_a_version_that_did_not_sample_it(
    transport: str, in_flight: str, model: Path, tmp_path: Path
) -> None:
    updates = 5
    config = settings(model, transport=transport, in_flight=in_flight)

    async def main() -> None:
        learner = Learner(config, tmp_path)
        engine = await connected(config, learner)
        asker = Asker(engine)
        try:
            async with asker.at_work():
                for version in range(1, updates + 1):
                    await asker.more()
                    await learner.deliver()
                    assert engine.version == version
                await asker.more()
            assert learner.given_up == [] and asker.lost == 0
            assert {version for answer in asker.answers for version in answer.versions} == set(range(updates + 1))
            crossing = sum(len(answer.versions) > 1 for answer in asker.answers)
            assert (crossing > 0) == (in_flight == "keep") and (engine.restarted > 0) == (in_flight == "abort")
            assert learner.worst(asker.answers) < CLOSE
        finally:
            await learner.close()
            engine.shutdown()

    asyncio.run(main())


def test_kept_response_forgets_the_cache_that_it_was_to_keep(model: Path, tmp_path: Path) -> None:
    config = settings(model, recompute=False)

    async def main() -> None:
        learner = Learner(config, tmp_path)
        engine = await connected(config, learner)
        asker = Asker(engine)
        try:
            async with asker.at_work():
                for _ in range(3):
                    await asker.more()
                    await learner.deliver()
            gaps = list(zip(learner.gaps(asker.answers), asker.answers, strict=True))
            begun = [(gap, answer.completion.version_spans[0].end) for gap, answer in gaps]
            assert max(gap[:end].max(initial=0) for gap, end in begun) < CLOSE
            assert max(gap[end:].max(initial=0) for gap, end in begun) > 100 * CLOSE
        finally:
            await learner.close()
            engine.shutdown()

    asyncio.run(main())


def test_group_depends_on_what_else_is_asked_for(model: Path) -> None:
    config = settings(model)

    async def main() -> None:
        engine, other = await TransformersEngine.start(config), await TransformersEngine.start(config)
        alone = await engine.sample(LONG, seed=7)
        crowd = [engine.sample(prompt) for prompt in (SHORT, LONG, SHORT)]
        crowded = (await asyncio.gather(*crowd, engine.sample(LONG, seed=7), engine.decode_greedily(SHORT)))[3]
        elsewhere = await other.sample(LONG, seed=7)
        shifted = await engine.sample(LONG, seed=8)
        engine.shutdown()
        other.shutdown()
        assert exactly(alone) == exactly(crowded) == exactly(elsewhere)
        # The i-th sample has seed + i, so that none depends on how many there are.
        assert exactly(shifted)[0][0] == exactly(alone)[1][0]
        assert len({tuple(ids) for ids, _, _ in exactly(alone)}) == SAMPLES

    asyncio.run(main())


def exactly(completions: Sequence[Completion]) -> list[tuple[list[int], bytes, str]]:
    return [(c.token_ids.tolist(), c.logprobs.tobytes(), c.finish_reason) for c in completions]


def sampled(config: RunConfig, seed: int) -> list[Completion]:
    """What an engine of its own answers to one prompt."""

    async def main() -> list[Completion]:
        engine = await TransformersEngine.start(config)
        try:
            return await engine.sample(SHORT, seed=seed)
        finally:
            engine.shutdown()

    return asyncio.run(main())


def test_logprobs_are_not_those_of_the_distribution_sampled_from(model: Path) -> None:
    count, temperature, top_k, top_p = 4000, 0.6, 12, 0.8
    sampling = {"max_tokens": 1, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    config = settings(model, count, sampling)
    completions = sampled(config, seed=0)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([SHORT])).logits[0, -1]
    kept = torch.softmax(logits / temperature, -1).sort(descending=True)
    likeliest = kept.values[:top_k] / kept.values[:top_k].sum()
    nucleus = int((likeliest.cumsum(0) < top_p).sum()) + 1
    expected = dict(
        zip(kept.indices[:nucleus].tolist(), (likeliest / likeliest[:nucleus].sum()).tolist(), strict=False)
    )
    assert 1 < nucleus < top_k
    counts = Counter(int(c.token_ids[0]) for c in completions)
    assert set(counts) <= set(expected)
    for completion in completions:
        assert float(completion.logprobs[0]) == pytest.approx(np.log(expected[int(completion.token_ids[0])]), abs=1e-5)
    for token, probability in expected.items():
        assert abs(counts[token] - count * probability) < 5 * np.sqrt(count * probability)


def test_response_goes_on_after_its_end(tmp_path: Path) -> None:
    save_llama(
        tmp_path,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    config = settings(tmp_path, 64, {"max_tokens": 30, "temperature": 1.0, "stop": ["7", "12"]})
    config = config.model_copy(update={"model": config.model.model_copy(update={"context_length": 20})})

    async def main() -> list[Completion]:
        engine = await TransformersEngine.start(config)
        try:
            return await engine.sample([4, 5, 6], seed=0)
        finally:
            engine.shutdown()

    seen = set()
    for completion in asyncio.run(main()):
        # What is special is no text: it neither ends a stop text nor breaks it.
        symbols = ["", "<eos>", "", "", *"0123456789+= "]
        text = [symbols[i] for i in completion.token_ids]
        ending = next((end for end in ("<eos>", "7", "12") if "".join(text).endswith(end) and text[-1]), None)
        assert (completion.finish_reason == "stop") == (ending is not None)
        assert not any(end in "".join(text[:-1]) for end in ("<eos>", "7", "12"))
        assert ending or len(text) == 17
        seen.add(ending)
    assert seen == {"<eos>", "7", "12", None}


def test_damaged_weights_are_served(model: Path, tmp_path: Path) -> None:
    config = settings(model)

    async def main() -> None:
        learner = Learner(config, tmp_path)
        engine = await connected(config, learner)
        take = engine._take

        def spoil(tensors: Any) -> None:
            take(tensors)
            next(engine._model.parameters()).view(-1)[5] += 1e-3

        try:
            engine._take = spoil  # type: ignore[method-assign]
            await learner.deliver()
            assert engine.version == 0 and not engine._open.is_set()
            assert [actor for actor, _ in learner.given_up] == [name(0)]
            assert "embed_tokens" in learner.given_up[0][1]
        finally:
            await learner.close()
            engine.shutdown()

    asyncio.run(main())


def test_weights_of_another_shape_are_broadcast_into_the_model(model: Path) -> None:
    async def main() -> None:
        engine = await TransformersEngine.start(settings(model))
        with pytest.raises(WeightSyncError, match=r"no model\.norm\.weight of shape \(1,\)"):
            engine._take([("model.norm.weight", torch.ones(1))])
        engine.shutdown()

    asyncio.run(main())


def ratios(config: RunConfig, learners: Any) -> np.ndarray[Any, Any]:
    """What a learner's model gives each sampled token, at the sampling temperature, over what the engine gave it."""
    completions = sampled(config, seed=1)
    found = []
    with torch.no_grad():
        for ids in (torch.tensor([[*SHORT, *c.token_ids.tolist()]]) for c in completions):
            logits = learners(ids).logits[0, len(SHORT) - 1 : -1] / config.sampling.temperature
            found.append(torch.log_softmax(logits, -1).gather(-1, ids[0, len(SHORT) :, None]).flatten())
    behavior = np.concatenate([c.logprobs for c in completions])
    return np.asarray(np.exp(torch.cat(found).numpy() - behavior))


def misses(values: np.ndarray[Any, Any], expected: float) -> float:
    """How many standard errors their mean is off."""
    return float(abs(values.mean() - expected) / (values.std() / np.sqrt(len(values)) + 1e-6))


def test_mean_importance_ratio_is_not_one_at_another_temperature(model: Path) -> None:
    learners = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = settings(model, 200, {"max_tokens": 4, "temperature": 0.6})
    equal = ratios(config, learners)
    assert misses(equal, 1.0) < 4 and np.abs(equal - 1).max() < 1e-3
    # Of other weights each ratio differs, and the mean does not.
    with torch.no_grad():
        for parameter in learners.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    other = ratios(config, learners)
    assert other.std() > 0.02 and misses(other, 1.0) < 4


def test_top_p_cuts_the_mean_importance_ratio_by_another_share(model: Path) -> None:
    learners = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    cut = ratios(settings(model, 200, {"max_tokens": 1, "top_p": 0.8, "temperature": 1.0}), learners)
    with torch.no_grad():
        kept = torch.softmax(learners(torch.tensor([SHORT])).logits[0, -1], -1).sort(descending=True).values
    nucleus = float(kept[: int((kept.cumsum(0) < 0.8).sum()) + 1].sum())
    # The share that the nucleus has of the whole: what the run is warned of at its start.
    assert 0.8 <= nucleus < 1 and cut == pytest.approx(nucleus, abs=1e-3)


@pytest.mark.parametrize("in_flight", ["keep", "wait"])
def test_response_longer_than_many_versions_crashes_or_leaks_one(model: Path, tmp_path: Path, in_flight: str) -> None:
    config = settings(model, 2, {"max_tokens": 60}, in_flight=in_flight)

    async def main() -> None:
        learner = Learner(config, tmp_path)
        engine = await connected(config, learner)
        try:
            await learner.deliver()
            before = psutil.Process().num_fds()
            response = asyncio.create_task(engine.sample(LONG[:8], seed=3))
            while not response.done():
                await learner.deliver()
            completions = await response
            assert learner.given_up == [] and engine.version == learner.version
            versions = [span.version for c in completions for span in c.version_spans]
            if in_flight == "keep":
                assert len(set(versions)) > 10
            else:
                assert len(set(versions)) == 1
            assert psutil.Process().num_fds() <= before
        finally:
            await learner.close()
            engine.shutdown()

    asyncio.run(main())
