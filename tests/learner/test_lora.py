"""Adapters: trained alone, over a base that stays the reference; saved, resumed, exported, published as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rank_processes import in_processes
from test_checkpoint import ORIGIN, entries, load, write
from test_learner_objective import statistics
from test_ranks import steps
from transformers import AutoModelForCausalLM

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, WeightSyncError
from counterflow.learner.batch import collate
from counterflow.learner.checkpoint import read_manifest
from counterflow.learner.learner import _layout
from counterflow.learner.lora import trained_weights
from counterflow.learner.rank import Rank
from counterflow.learner.trainer import Trainer
from counterflow.weight_sync.adapter import Adapter, Merger, read_base
from counterflow.weight_sync.fingerprint import by_group, fingerprint
from counterflow.weight_sync.layout import Layout

pytest.importorskip("peft")
IDS = torch.arange(3, 15)[None]


def configured(model: Path, lora: dict[str, Any] | None = None, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 2, "samples_per_group": 3, "max_lag": 99},
            "objective": {"kl": {"beta": 0.05, "estimator": "k3", "placement": "loss"}},
            "learner": {"lr": 1e-2, "lora": {"rank": 4, "alpha": 8, **(lora or {})}, **learner},
            "run": {"step_timeout_s": 120},
            "checkpoint": {"every": 0},
        }
    )


def trained(config: RunConfig, count: int = 3) -> Trainer:
    trainer = Trainer(config)
    for step in range(count):
        trainer.train(entries(step))
    return trainer


def adapter_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.weights()])


def test_base_is_trained_or_the_reference_follows_the_adapter(tiny_model: Path) -> None:
    trainer = trained(configured(tiny_model))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    frozen = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in trainer.policy.model.named_parameters()
        if not parameter.requires_grad
    }
    assert frozen.keys() == dict(base.named_parameters()).keys()
    assert all(torch.equal(frozen[name], parameter) for name, parameter in base.named_parameters())
    assert all(".lora_" in name for name, _ in trainer.weights())
    batch = collate([entries(0)[0].group], 0, trainer._ranks.own.packing)
    untrained = Trainer(configured(tiny_model, {"targets": ["q_proj"]}, lr=1e-9))
    reference = trainer.policy.reference_logprobs(batch)
    assert reference is not None
    assert torch.equal(reference, untrained.policy.reference_logprobs(batch))
    torch.testing.assert_close(reference, untrained.policy.logprobs(batch)[0].detach(), atol=0, rtol=0)
    assert (trainer.policy.logprobs(batch)[0] - reference).abs().max() > 0.01
    assert trainer._ranks.own.policy.reference is trainer.policy.model, "there is a second model"


def test_whole_vocabulary_divergence_is_of_the_adapter_from_the_base(tiny_model: Path) -> None:
    trainer = trained(configured(tiny_model))
    batch = collate([entries(0)[0].group], 0, trainer._ranks.own.packing)
    found, reference = statistics(trainer.policy, batch)
    assert torch.equal(reference, trainer.policy.reference_logprobs(batch))
    assert found.divergences is not None and (found.divergences > 1e-5).all()
    found.divergences.sum().backward()
    assert any(p.grad is not None and p.grad.norm() > 0 for p in trainer.policy.model.parameters())


def test_adapter_after_a_checkpoint_differs_from_that_without_one(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model)
    whole = trained(config)
    path = write(tmp_path, whole, config)
    stored = sum(size for size, _ in read_manifest(path, ORIGIN, config).files.values())
    assert stored < (tiny_model / "model.safetensors").stat().st_size / 2, "the base is in the checkpoint"
    rest = [whole.train(entries(step))[0] for step in range(3, 5)]
    resumed = load(path, config)
    again = [resumed.train(entries(step))[0] for step in range(3, 5)]
    assert again == rest and torch.equal(adapter_of(resumed), adapter_of(whole))


def test_export_is_not_the_policy(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = trained(configured(tiny_model))
    trainer.save(tmp_path / "model")
    with torch.no_grad():
        expected = trainer.policy.model(IDS).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        assert (merged(IDS).logits - expected).abs().max() < 1e-4 < (base(IDS).logits - expected).abs().max()
        adapted = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter")
        assert (adapted(IDS).logits - expected).abs().max() < 1e-5


def test_adapter_gets_no_gradient_where_activations_are_computed_again(tiny_model: Path) -> None:
    kept, again = (trained(configured(tiny_model, activation_checkpointing=on)) for on in (False, True))
    torch.testing.assert_close(adapter_of(again), adapter_of(kept), rtol=1e-4, atol=1e-6)


def go_on(number: int, configs: list[RunConfig], state: Path | None) -> list[Any]:
    found = []
    for config in configs:
        rank = Rank(config)
        gradient = [p.grad for p in rank.policy.model.parameters()]
        assert not any(p is not None for p in gradient)
        steps(rank, config, number, range(3))
        found.append(torch.cat([tensor.flatten().clone() for _, tensor in rank.weights()]).numpy())
        if state is not None:
            saved = rank.state()
            if number == 0:
                torch.save(saved, state)
            rank.load_state(saved)
            steps(rank, config, number, range(3, 5))
            found.append(torch.cat([tensor.flatten().clone() for _, tensor in rank.weights()]).numpy())
    return found


def test_ranks_train_another_adapter_than_one_process(tiny_model: Path, tmp_path: Path) -> None:
    one = configured(tiny_model, lr=1e-3, microbatch_tokens=60)
    alone = [torch.from_numpy(found) for found in go_on(0, [one], tmp_path / "state")]
    start = torch.cat([tensor.flatten().clone() for _, tensor in Rank(one).weights()])
    several = [
        configured(tiny_model, lr=1e-3, microbatch_tokens=60, ranks=2, backend=backend) for backend in ("ddp", "fsdp2")
    ]
    found = [torch.from_numpy(weights) for weights in in_processes(several[0], go_on, several, tmp_path / "several")]
    for weights, expected in zip(found, alone * 2, strict=True):
        assert (weights - expected).norm() <= 1e-3 * (expected - start).norm()


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["lm_head"]}, "learner.lora.targets names lm_head, which is the output layer"),
        (
            {"targets": ["embed_tokens"]},
            "learner.lora.targets names model.embed_tokens, which is the output layer or not",
        ),
        ({"targets": ["q_porj"]}, "learner.lora.targets does not fit LlamaForCausalLM: Target modules .*q_porj"),
    ],
)
def test_layer_that_cannot_be_adapted_is_trained_by_nobody(tiny_model: Path, lora: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(configured(tiny_model, lora))


def test_adapters_with_deepspeed_begin(tiny_model: Path) -> None:
    with pytest.raises(ValidationError, match=r"learner\.lora with learner\.backend=zero2"):
        configured(tiny_model, ranks=2, backend="zero2")


def test_merged_weights_differ_from_the_exported_ones(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model, {"targets": ["q_proj", "down_proj"]})
    trainer = trained(config)
    layout = Layout.from_dict(_layout(config, trainer.policy.model).to_dict())
    assert layout.adapter is not None and layout.total_bytes < (tiny_model / "model.safetensors").stat().st_size / 10
    merger, loaded = Merger(layout.adapter, "cpu"), {}
    merger.arrive(trainer.weights())
    merger.load(lambda tensors: loaded.update(tensors))
    trainer.save(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.keys() == dict(exported.named_parameters()).keys()
    assert all(torch.equal(loaded[name], parameter) for name, parameter in exported.named_parameters())
    held = by_group((name, fingerprint(tensor)) for name, tensor in loaded.items())
    arrived = by_group((name, fingerprint(tensor)) for name, tensor in trained_weights(trainer.policy.model))
    assert merger.vouch(held, whole=True) == arrived
    loaded["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    wrong = by_group((name, fingerprint(tensor)) for name, tensor in loaded.items())
    with pytest.raises(WeightSyncError, match=r"other weights than were merged in tensor group layers\.1$"):
        merger.vouch(wrong, whole=True)


def test_adapter_is_merged_into_another_base(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model)
    layout = _layout(config, Trainer(config).policy.model)
    assert layout.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path / "other")
    there = layout.adapter
    other = Adapter(str(tmp_path / "other"), there.names, there.scaling, there.dtype, there.base)
    with pytest.raises(WeightSyncError, match="holds another model here than on the learner's host"):
        Merger(other, "cpu")
    with pytest.raises(WeightSyncError, match=r"holds no tensor model\.none"):
        list(read_base(tiny_model, ["model.none"]))
