"""The real engine, tied head and all, when what it loads is not what was published."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from live_engines import known
from llamas import save_llama

from counterflow.cluster import process_environment
from counterflow.configs.schema import RunConfig
from counterflow.errors import WeightSyncError
from counterflow.weight_sync.delivery import update
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import Layout, lay_out, named_weights
from counterflow.weight_sync.publisher import Publisher, Shipment
from counterflow.weight_sync.slots import Slots
from counterflow.weight_sync.transports import SharedMemory

if TYPE_CHECKING:
    from counterflow.actors.vllm_engine import VllmEngine

PROMPT = [3, 4, 5, 6]

Sent = tuple[Shipment, Fingerprints]


@dataclass
class Pair:
    """A publisher with its model, an engine connected to it, and the loop the engine lives in."""

    model: Any
    slots: Slots
    publisher: Publisher
    engine: VllmEngine
    runner: asyncio.Runner
    version: int = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def connect(self, layout: Layout) -> None:
        self.run(self.engine.connect_weights("actor 0", layout))

    def stage(self) -> Sent:
        """A version that differs from the last in every element."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return self.ship()

    def ship(self) -> Sent:
        staged = self.publisher.stage(self.version, self.version % 2, named_weights(self.model))
        return self.publisher.prepare(staged, ["actor 0"]), self.publisher.send(staged)

    def views(self, sent: Sent) -> dict[str, torch.Tensor]:
        return dict(self.slots.tensors(sent[0].version % 2))

    def update(self, sent: Sent) -> None:
        shipment, published = sent
        self.run(update(self.engine, shipment, known(published)))

    def gap(self) -> float:
        """Largest difference of a sampled token's log-prob from the model's, in nats."""
        completion = self.run(self.engine.sample(PROMPT))[0]
        assert {span.version for span in completion.version_spans} == {self.version}
        ids = torch.tensor([PROMPT + completion.token_ids.tolist()])
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(ids).logits.float(), -1)[0, len(PROMPT) - 1 : -1]
        expected = logprobs.gather(-1, ids[0, len(PROMPT) :, None]).squeeze(-1).numpy()
        return float(np.abs(expected - completion.logprobs).max())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tied-model")
    model = save_llama(
        folder,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    config = RunConfig.model_validate(
        {
            "model": {"path": folder, "context_length": 64},
            "sampling": {"max_tokens": 24, "temperature": 1.0},
            "admission": {"samples_per_group": 2},
            "actors": {"kv_cache_bytes": 64 << 20},
        }
    )
    layout = lay_out(named_weights(model), torch.float32)
    slots = Slots(layout)
    publisher = Publisher(slots, SharedMemory(slots))
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        for name, value in process_environment(cpus=1, gpus=0).items():
            patch.setenv(name, value)
        from counterflow.actors.vllm_engine import VllmEngine

        try:
            engine = runner.run(VllmEngine.start(config))
            try:
                runner.run(engine.connect_weights("actor 0", layout))
                yield Pair(model, slots, publisher, engine, runner)
            finally:
                engine.shutdown()
        finally:
            publisher.close()


def test_tied_head_goes_on_with_its_old_packed_copy(pair: Pair) -> None:
    for _ in range(3):
        staged = pair.stage()
        assert set(staged[1]) == {"embed_tokens", "layers.0", "layers.1", "norm"}
        pair.update(staged)
        assert pair.gap() < 1e-4


def test_tensor_corrupted_in_the_slot_is_served(pair: Pair) -> None:
    served = pair.engine.version
    for name, group in (
        ("model.layers.1.self_attn.v_proj.weight", "layers.1"),
        ("model.layers.0.post_attention_layernorm.weight", "layers.0"),
        ("model.embed_tokens.weight", "embed_tokens"),
    ):
        staged = pair.stage()
        pair.views(staged)[name].view(torch.int32).view(-1)[7] ^= 1
        with pytest.raises(WeightSyncError, match=f"version {pair.version}: .* in tensor group {group}:"):
            pair.update(staged)
        assert pair.engine.version == served
    pair.update(pair.ship())
    assert pair.engine.version == pair.version and pair.gap() < 1e-4


@pytest.mark.parametrize(
    ("lacking", "group"),
    [
        ("model.norm.weight", "norm"),
        ("model.layers.1.mlp.down_proj.weight", "layers.1"),
        ("model.layers.0.self_attn.k_proj.weight", "layers.0"),
        ("model.layers.1.", "layers.1"),
    ],
)
def test_tensor_that_never_arrives_leaves_the_old_one_in_use(pair: Pair, lacking: str, group: str) -> None:
    whole = pair.publisher.layout
    pair.connect(replace(whole, slots=tuple(slot for slot in whole.slots if not slot.name.startswith(lacking))))
    staged = pair.stage()
    with pytest.raises(WeightSyncError, match=f"version {pair.version}: .* in tensor group {group}:"):
        pair.update(staged)
    pair.connect(whole)
    pair.update(staged)
    assert pair.gap() < 1e-4


def test_layers_arrive_in_each_others_place(pair: Pair) -> None:
    whole = pair.publisher.layout
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}

    def swapped(name: str) -> str:
        found = next((layer for layer in other if layer in name), None)
        return name.replace(found, other[found]) if found else name

    pair.connect(replace(whole, slots=tuple(replace(slot, name=swapped(slot.name)) for slot in whole.slots)))
    staged = pair.stage()
    with pytest.raises(WeightSyncError, match=r"in tensor group layers.0, layers.1:"):
        pair.update(staged)
    pair.connect(whole)
    pair.update(staged)
    assert pair.gap() < 1e-4


def test_actor_is_idle_while_its_version_is_proved() -> None:
    from counterflow.actors.busy_clock import BusyClock
    from counterflow.actors.rollout import RolloutActor

    class Willing:
        async def load(self, shipment: Shipment) -> list[Fingerprints]:
            if shipment.version == 1:
                raise WeightSyncError("policy version 1 was not loaded")
            return []

        async def serve(self, version: int) -> None:
            pass

    async def main() -> None:
        actor = RolloutActor.__new__(RolloutActor)
        actor._busy, actor._engine = BusyClock("actor 5", 0.0), Willing()  # type: ignore[assignment]
        actor._update, actor._new_version = ExitStack(), asyncio.Event()
        with pytest.raises(WeightSyncError):
            await actor.load(Shipment(1, {}))
        failed = actor._busy._now()
        await asyncio.sleep(0.01)
        await actor.load(Shipment(2, {}))
        loaded = actor._busy._now()
        await asyncio.sleep(0.01)
        await actor.serve(2)
        served = actor._busy._now()
        first, second = actor._busy.drain()
        # From the first load to the service.
        assert {first.activity, second.activity} == {"update"}
        assert first.start_s <= failed < first.end_s <= second.start_s <= loaded < second.end_s <= served
        assert actor._busy.drain() == []

    asyncio.run(main())
