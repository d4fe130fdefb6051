"""The model that is trained and its frozen reference: loading, and log-probs of response tokens.

Hugging Face folders flow in; the objective sees only log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.batch import Microbatch
from counterflow.learner.logprobs import Projection, token_logprobs, token_statistics
from counterflow.learner.lora import adapter_off
from counterflow.learner.packing import Packing

_LEAK = 1e-3
"""Nats by which packed and separate log-probs may differ, rounding of any precision included."""


def load_model(config: RunConfig, device: torch.device) -> torch.nn.Module:
    """The causal language model in `model.path`, float32, without dropout.

    Raises:
        ConfigError: the folder holds no such model.
    """
    if not config.model.path.is_dir():
        # Or else transformers would take it for a name on a hub.
        raise ConfigError(f"model.path {config.model.path}: there is no such folder: check the path")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {config.model.path} holds no causal language model: {error}") from error
    # eval: dropout would make pi differ from itself between two forwards.
    model = model.to(device).eval()
    if config.learner.activation_checkpointing:
        checkpoint_activations(model)
    return model  # type: ignore[no-any-return]


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Have every layer of the model keep its input only, and compute the rest again in backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # transformers checkpoints while training; what is inside, dropout above all, stays as in evaluation.
            module.training = True


def packing_of(config: RunConfig, model: torch.nn.Module) -> Packing:
    """How sequences are packed for this model.

    Raises:
        ConfigError: `learner.packing` is on, and the model lets packed sequences see each other.
    """
    if not config.learner.packing:
        return Packing.PADDED
    if leak(model) > _LEAK:
        raise ConfigError(
            f"learner.packing=true: {type(model).__name__} in model.path {config.model.path} lets responses that share "
            "a row see each other (it ignores position_ids, or keeps a state): set learner.packing=false"
        )
    flash = "flash" in str(getattr(model.config, "_attn_implementation", ""))
    return Packing.ONE_ROW if flash else Packing.ROWS


@torch.no_grad()
def leak(model: torch.nn.Module) -> float:
    """How far the states of a sequence packed behind another are from those of it alone, relative to their size."""
    device = next(model.parameters()).device
    ids = torch.arange(2, 14, device=device)[None] % model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None].to(device)
    packed = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)  # type: ignore[operator]
    alone = model.base_model(input_ids=ids[:, 7:], use_cache=False).last_hidden_state  # type: ignore[operator]
    return float((packed.last_hidden_state[:, 7:] - alone).norm() / alone.norm())


class Scores(NamedTuple):
    """What a forward says of response tokens, float32 [tokens]."""

    logprobs: Tensor
    """Natural log-probs, with gradient."""
    entropies: Tensor
    """Nats; with gradient only beside divergences."""
    divergences: Tensor | None = None
    """KL(pi || ref) over the whole vocabulary, with gradient; None where no reference was given."""


class Scorer(torch.nn.Module):
    """A causal language model whose forward gives log-probs of response tokens instead of logits.

    Data-parallel wrappers take it as a whole: the head is used inside its forward.
    """

    def __init__(self, model: torch.nn.Module, precision: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._precision, self._device = precision, device

    def forward(self, batch: Microbatch, temperature: float, frozen: Projection | None = None) -> Scores:
        """Scores of the batch's targets; `frozen` is the reference at the same tokens, for divergences."""
        return self.score(self.project(batch), batch, temperature, frozen)

    def score(
        self, last: Projection, batch: Microbatch, temperature: float, frozen: Projection | None = None
    ) -> Scores:
        """Scores from the states that predict the targets."""
        targets = batch.targets.to(self._device)
        with self._autocast():
            if frozen is None:
                return Scores(*token_logprobs(last.hidden, last.head, targets, temperature))
            found = token_statistics(last, targets, temperature, frozen)
            return Scores(found.logprobs, found.entropies, found.divergences)

    def project(self, batch: Microbatch) -> Projection:
        """The states that predict the targets, and the head."""
        # Right padding comes after every real token, so that causal attention alone hides it; sequences that share a
        # row are told apart by their positions, for which there must be neither mask nor cache.
        positions = None if batch.position_ids is None else batch.position_ids.to(self._device)
        with self._autocast():
            output = self.model.base_model(  # type: ignore[operator]
                input_ids=batch.input_ids.to(self._device), position_ids=positions, use_cache=False
            )
        chosen = output.last_hidden_state.flatten(0, 1)[batch.predictors.to(self._device)]
        return Projection(chosen, self.model.get_output_embeddings())  # type: ignore[operator]

    def states(self, batch: Microbatch) -> Projection:
        """`project`, called from outside a forward: data-parallel wrappers take it for one."""
        return self.project(batch)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._precision, enabled=self._precision == torch.bfloat16)


class Policy:
    """Current and reference policy, with the forward that both share.

    Args:
        reference: the model itself where that has an adapter, without which it is the reference.
        precision: dtype of forward and backward; weights stay float32.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        reference: torch.nn.Module | None,
        temperature: float,
        precision: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.reference = model, reference
        self.temperature, self.device = temperature, device
        self.scorer: torch.nn.Module = Scorer(model, precision, device)
        """What runs the current policy; a backend may put its wrapper here."""
        self.frozen: torch.nn.Module | None = None
        """What runs the reference."""
        self._alone: Callable[[], AbstractContextManager[None]] = nullcontext
        if reference is model:
            self.frozen, self._alone = self.scorer, partial(adapter_off, model)
        elif reference is not None:
            self.frozen = Scorer(reference, precision, device)

    def logprobs(self, batch: Microbatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs under the current policy, float32 [tokens] with gradient, and entropies, detached."""
        found = self.scorer(batch, self.temperature if temperature is None else temperature)
        return found[0], found[1]

    @torch.no_grad()
    def reference_logprobs(self, batch: Microbatch) -> Tensor | None:
        """Log-probs under the frozen reference, float32 [tokens]; None where there is no reference."""
        if self.frozen is None:
            return None
        with self._alone():
            found: Tensor = self.frozen(batch, self.temperature)[0]
        return found

    @torch.no_grad()
    def frozen_projection(self, batch: Microbatch) -> tuple[Projection, Tensor]:
        """The reference's states at the batch's tokens with its head, and its log-probs: float32 [tokens]."""
        assert self.frozen is not None
        with self._alone():
            last: Projection = self.frozen.states(batch)  # type: ignore[operator]
        scores: Scores = self.frozen.score(last, batch, self.temperature)  # type: ignore[operator]
        return last, scores.logprobs
