"""The model that is trained and its frozen reference: loading, log-probs of response tokens, saving.

Hugging Face folders flow in and out; the objective sees only log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.batch import Microbatch
from counterflow.learner.logprobs import Projection, TokenStatistics, token_logprobs, token_statistics


def load_model(config: RunConfig, device: torch.device) -> torch.nn.Module:
    """The causal language model in `model.path`, float32, without dropout.

    Raises:
        ConfigError: the folder holds no such model.
    """
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
    return model.to(device).eval()  # type: ignore[no-any-return]


class Policy:
    """Current and reference policy, with the forward that both share.

    Args:
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
        self._temperature, self._precision, self._device = temperature, precision, device

    def at_temperature(self, temperature: float) -> Policy:
        """The same models at this temperature; the policy itself where that is its own."""
        if temperature == self._temperature:
            return self
        return Policy(self.model, self.reference, temperature, self._precision, self._device)

    def logprobs(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probs under the current policy, float32 [tokens] with gradient, and entropies, detached."""
        return self._forward(self.model, batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: Microbatch) -> Tensor | None:
        """Log-probs under the frozen reference, float32 [tokens]; None where there is no reference."""
        return None if self.reference is None else self._forward(self.reference, batch)[0]

    def statistics(self, batch: Microbatch) -> tuple[TokenStatistics, Tensor]:
        """Log-probs, entropies and full-vocabulary KL from the reference, with gradient; and the reference's log-probs.

        All float32 [tokens]; one forward of each model.
        """
        assert self.reference is not None
        targets = batch.targets.to(self._device)
        with self._autocast():
            with torch.no_grad():
                frozen = self._project(self.reference, batch)
                reference, _ = token_logprobs(frozen.hidden, frozen.head, targets, self._temperature)
            return token_statistics(self._project(self.model, batch), targets, self._temperature, frozen), reference

    def _forward(self, model: torch.nn.Module, batch: Microbatch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            last = self._project(model, batch)
            return token_logprobs(last.hidden, last.head, batch.targets.to(self._device), self._temperature)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._precision, enabled=self._precision == torch.bfloat16)

    def _project(self, model: torch.nn.Module, batch: Microbatch) -> Projection:
        # Right padding comes after every real token, so that causal attention alone hides it.
        output = model.base_model(input_ids=batch.input_ids.to(self._device), use_cache=False)  # type: ignore[operator]
        chosen = output.last_hidden_state.flatten(0, 1)[batch.predictors.to(self._device)]
        return Projection(chosen, model.get_output_embeddings())  # type: ignore[operator]
