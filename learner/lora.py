"""LoRA by peft: two small matrices beside each frozen linear layer, which alone are trained, published and saved.

A model flows in and is changed in place; with the adapter off it is the base, and so the reference. What `peft` is
imported for happens here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from counterflow.configs.learner import LoraSection
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, WeightSyncError, first_line
from counterflow.weight_sync.adapter import Adapter, merged

_NAME = "default"


def adapt(model: torch.nn.Module, lora: LoraSection) -> None:
    """Freeze the model and put matrices that are trained beside its linear layers. At first they change nothing.

    Raises:
        ConfigError: peft is not installed, or the targets are not linear layers of this model.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"learner.lora needs peft, which cannot be imported here ({error}): pip install 'counterflow[lora]', or "
            "leave it out"
        ) from error
    try:
        inject_adapter_in_model(_settings(lora), model, _NAME)
    except ValueError as error:
        raise ConfigError(f"learner.lora.targets does not fit {type(model).__name__}: {first_line(error)}") from error
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, layer in _layers(model):
        if type(layer.get_base_layer()) is not torch.nn.Linear or layer is head:
            raise ConfigError(
                f"learner.lora.targets names {name}, which is the output layer or not linear: name layers of attention "
                "and MLP only"
            )


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """While the context is open the model is its base, exactly."""
    layers = [layer for _, layer in _layers(model)]
    # To disable the layers would also freeze their matrices, which sharded ones do not survive.
    for layer in layers:
        layer.set_scale(_NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_NAME, 1.0)


def trained_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that training changes, under their names; tied ones once."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.detach()


def adapter_of(config: RunConfig, model: torch.nn.Module) -> Adapter | None:
    """What the trained weights of an adapted model belong to; None where they are the model's own.

    Raises:
        ConfigError: the model's folder does not hold its tensors under their names, as safetensors.
    """
    lora = config.learner.lora
    if lora is None:
        return None
    names = [_on_disk(name) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    try:
        return Adapter.of(config.model.path, names, lora.alpha / lora.rank, getattr(torch, config.actors.dtype))
    except WeightSyncError as error:
        raise ConfigError(f"learner.lora cannot be used with model.path: {error}") from error


@torch.no_grad()
def export(base: Any, adapter: Mapping[str, Tensor], config: RunConfig, folder: Path) -> None:
    """Write a Hugging Face folder of the merged model, and in its subfolder `adapter` the adapter, as peft reads it.

    Args:
        base: the model without an adapter, which is changed.
    """
    lora = config.learner.lora
    assert lora is not None
    parameters = dict(base.named_parameters())
    device = next(iter(parameters.values())).device
    for name, weight in merged(parameters.items(), adapter, lora.alpha / lora.rank, torch.float32, device):
        parameters[name].copy_(weight)
    base.save_pretrained(folder)
    settings = _settings(lora)
    settings.base_model_name_or_path = str(config.model.path)
    settings.save_pretrained(folder / "adapter")
    save_file(
        {f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.cpu() for name, tensor in adapter.items()},
        folder / "adapter" / "adapter_model.safetensors",
    )


def _settings(lora: LoraSection) -> Any:
    from peft import LoraConfig

    # Dropout would make pi differ from itself between two forwards.
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(lora.targets) if lora.targets else "all-linear",
        task_type="CAUSAL_LM",
    )


def _layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _on_disk(name: str) -> str:
    return name.replace(".base_layer.", ".")
