"""One rank of the learner: a model, its backend, and its share of every batch.

Plans flow in from rank 0; what was measured of the trained tokens flows back. All ranks run the same calls in the same
order, because each holds collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from counterflow.buffer.trajectory import Group
from counterflow.configs.schema import RunConfig
from counterflow.learner.backends.base import Backend
from counterflow.learner.backends.choice import open_backend
from counterflow.learner.batch import Microbatch, collate
from counterflow.learner.canary import measure
from counterflow.learner.lora import adapt
from counterflow.learner.objective.loss import policy_loss
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.types import PolicyBatch, concatenate
from counterflow.learner.objective_choice import needs_reference, objective_spec
from counterflow.learner.policy import Policy, load_model, packing_of
from counterflow.learner.verdict import judge, rule_of
from counterflow.weight_sync.canary import Gap


@dataclass(frozen=True)
class Part:
    """What one rank found in one update."""

    batch: PolicyBatch | None
    """Its tokens, detached, in memory of the CPU; None where it had none."""
    loss: float
    entropy: float
    """Sum over the trained tokens."""


class Rank:
    """One rank. With several, the default process group must be there."""

    def __init__(self, config: RunConfig) -> None:
        if not config.learner.gpus:
            torch.set_num_threads(config.learner.cpus)
        torch.manual_seed(config.run.seed)
        self._config = config
        self._device = torch.device("cuda" if config.learner.gpus else "cpu")
        model = load_model(config, self._device)
        if config.learner.lora is not None:
            adapt(model, config.learner.lora)
        self.packing = packing_of(config, model)
        self._pad_token_id = int(model.config.pad_token_id or 0)  # type: ignore[union-attr, arg-type]
        reference = None
        if needs_reference(config):
            adapted = config.learner.lora is not None
            reference = model if adapted else load_model(config, self._device).requires_grad_(False)
        precision = getattr(torch, config.learner.dtype)
        self.policy = Policy(model, reference, config.sampling.temperature, precision, self._device)
        self._needs_divergence = objective_spec(config).needs_divergence
        self.backend: Backend = open_backend(self.policy, config)
        self._rule, self._mask_truncated = rule_of(config), config.reward.truncated == "mask"
        self._batches: list[list[Microbatch]] = []
        self._shares: list[list[Tensor]] = []
        self._references: list[list[Tensor | None]] = []
        self._proximal: list[list[Tensor | None]] = []

    def begin(
        self, updates: Sequence[Sequence[Sequence[Group]]], version: int, again: bool, needs_proximal: bool
    ) -> None:
        """Take this rank's microbatches of every update of a batch, and all that must be known before the first.

        Args:
            version: the policy's, which the lags of the tokens are counted from.
            again: the batch is the one before, whose reference log-probs are kept.
            needs_proximal: keep the log-probs of the weights as they are now.
        """
        self._batches = [[collate(groups, self._pad_token_id, self.packing) for groups in rounds] for rounds in updates]
        self._shares = [[self._share(groups, version) for groups in rounds] for rounds in updates]
        if not again:
            self._references = [[self._reference(batch) for batch in batches] for batches in self._batches]
        # Before the only update pi is still the policy of the step's start: no forward.
        several = needs_proximal and len(updates) > 1
        self._proximal = [[self._current(batch) if several else None for batch in own] for own in self._batches]

    def accumulate(self, update: int, spec: ObjectiveSpec, divisor: float) -> Part:
        """Forward and backward of one update; the gradient is then that of all ranks."""
        batches = self._batches[update]
        done: list[PolicyBatch] = []
        loss_sum, entropy_sum = 0.0, 0.0
        for index, batch in enumerate(batches):
            self.backend.begin(first=index == 0, last=index == len(batches) - 1)
            policy_batch, entropies = self._score(
                batch, spec, self._references[update][index], self._proximal[update][index]
            )
            policy_batch = replace(policy_batch, share=self._shares[update][index])
            empty = not len(batch.rewards)
            loss = policy_batch.logprobs.sum() if empty else policy_loss(policy_batch, spec, divisor)
            self.backend.backward(loss)
            if not empty:
                done.append(policy_batch)
                loss_sum += float(loss.detach())
                entropy_sum += float(entropies[policy_batch.trained].sum())
        return Part(_on_cpu(concatenate(done)) if done else None, loss_sum, entropy_sum)

    def apply(self, learning_rate: float) -> float:
        """Step of the optimizer; returns the gradient's norm. One that is not finite changes nothing."""
        return self.backend.step(learning_rate, self._config.learner.max_grad_norm)

    def renew_reference(self) -> None:
        """Make the policy, as it is now, the reference."""
        self.backend.renew_reference()

    def state(self) -> dict[str, Any]:
        """Weights, the optimizer's moments by parameter name, the state of the random generator; whole, on rank 0.

        Of one rank alone they are the living ones, which the next step changes.
        """
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        return {**self.backend.state(), "random": random}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state; only rank 0 must have it."""
        self.backend.load_state(state)
        if random := state.get("random"):
            torch.set_rng_state(random["cpu"])
            if "cuda" in random and self._device.type == "cuda":
                torch.cuda.set_rng_state(random["cuda"], self._device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole weights, gathered one after the other."""
        return self.backend.gather_bucket()

    def help_gather(self) -> None:
        """Take part in `weights` on another rank."""
        deque(self.backend.gather_bucket(), maxlen=0)

    def compare(self, groups: Sequence[Group], version: int) -> Gap:
        """How far an engine's log-probs of these groups are from those of the policy, which has this version."""
        tokens = self._config.learner.microbatch_tokens
        return measure(self.policy, groups, version, tokens, self._pad_token_id, self.packing)

    def _share(self, groups: Sequence[Group], version: int) -> Tensor:
        shares, _ = judge(groups, version, self._rule, mask_truncated=self._mask_truncated)
        return torch.from_numpy(shares).to(self._device)

    def _reference(self, batch: Microbatch) -> Tensor | None:
        # The KL of whole vocabularies needs the reference's states at every update, and has its log-probs from them.
        return None if self._needs_divergence else self.policy.reference_logprobs(batch)

    @torch.no_grad()
    def _current(self, batch: Microbatch) -> Tensor:
        return self.backend.forward_logprobs(batch).logprobs

    def _score(
        self, batch: Microbatch, spec: ObjectiveSpec, reference: Tensor | None, proximal: Tensor | None
    ) -> tuple[PolicyBatch, Tensor]:
        frozen = None
        if spec.needs_divergence:
            frozen, reference = self.policy.frozen_projection(batch)
        scores = self.backend.forward_logprobs(batch, frozen)
        if proximal is None and spec.needs_proximal:
            proximal = scores.logprobs.detach()
        policy_batch = PolicyBatch(
            logprobs=scores.logprobs,
            behavior_logprobs=batch.behavior_logprobs.to(self._device),
            reference_logprobs=reference,
            proximal_logprobs=proximal,
            loss_mask=batch.loss_mask.to(self._device),
            sequence=batch.sequence.to(self._device),
            rewards=batch.rewards.to(self._device),
            group=batch.group.to(self._device),
            reference_divergence=scores.divergences,
        )
        return policy_batch, scores.entropies.detach()


def _on_cpu(batch: PolicyBatch) -> PolicyBatch:
    moved: dict[str, Any] = {name: value.cpu() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **moved)
