"""The trainer: a policy, its optimizer and its objective; takes the groups of one step, makes one version of them.

Deterministic: the same start and the same groups in the same order make the same weights, bit for bit on a CPU in
float32. So a run is its archive. Knows neither the buffer's server nor weight sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Group
from counterflow.configs.schema import RunConfig
from counterflow.errors import RunFailed
from counterflow.learner.batch import lags_of, loss_mask
from counterflow.learner.lora import export
from counterflow.learner.objective.diagnostics import diagnose, remarks
from counterflow.learner.objective.loss import normalizer
from counterflow.learner.objective.ratios import learning_rate_scale
from counterflow.learner.objective.types import concatenate
from counterflow.learner.objective_choice import needs_reference, next_beta, objective_spec
from counterflow.learner.packing import scored
from counterflow.learner.plan import plan
from counterflow.learner.policy import Policy, load_model
from counterflow.learner.ranks import Ranks
from counterflow.learner.schedule import learning_rate
from counterflow.learner.staleness import Shares
from counterflow.learner.step_record import UpdateResult, step_record
from counterflow.learner.verdict import Account, judge, rule_of
from counterflow.records import StepRecord
from counterflow.weight_sync.canary import Gap
from counterflow.weight_sync.lag import TokenLags


@dataclass(frozen=True)
class TrainerState:
    """All that a version consists of, beside the configuration.

    `tensors` is nested: weights and the optimizer's moments by parameter name, and the state of the random generator.
    """

    tensors: dict[str, Any]
    values: dict[str, float | int]
    """Plain numbers: the version, beta, the updates skipped in a row, and the reference's version."""


class Trainer:
    """Makes one version after the other; `version` counts the steps taken.

    Args:
        followers: Ray actors of the other ranks (`Follower`).

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: RunConfig, followers: Sequence[Any] = ()) -> None:
        self._config = config
        self._ranks = Ranks(config, followers)
        self._spec = objective_spec(config)
        self._length_constant = config.objective.length_constant or config.sampling.max_tokens
        self._rule = rule_of(config)
        self._skipped_in_a_row = 0
        self._last_batch: list[int] = []
        self._reads_reference, self._reference_version = needs_reference(config), 0
        self.version = 0

    @property
    def policy(self) -> Policy:
        """Rank 0's."""
        return self._ranks.own.policy

    def train(self, entries: Sequence[Entry], dropped: Account | None = None) -> tuple[StepRecord, list[str]]:
        """Take the step that makes the next version, in one optimizer step or several; its record, and remarks on it.

        An update whose gradient is not finite leaves weights and optimizer as they are: its groups are used up, and
        replay skips it, too. After `learner.max_skipped_steps` of them in a row the next one fails.

        Args:
            dropped: an account of the groups that were dropped as stale since the step before, for the record.

        Raises:
            RunFailed: one skipped update too many, or a token is staler than `admission.max_lag` allows.
        """
        learner, step = self._config.learner, self.version + 1
        groups = [entry.group for entry in entries]
        updates = plan(
            groups, learner.updates_per_batch, learner.ranks, learner.microbatch_tokens, self._ranks.own.packing
        )
        ordered = [entries[index] for update in updates for index in update.order]
        shares, account = judge(
            [entry.group for entry in ordered],
            self.version,
            self._rule,
            mask_truncated=self._config.reward.truncated == "mask",
        )
        lags = self._lags(ordered, shares)
        admissions = [group.admission for group in groups]
        self._ranks.begin(updates, self.version, admissions == self._last_batch, self._spec.needs_proximal)
        self._last_batch = admissions
        notes: list[str] = []
        done = [
            self._update(index, [groups[i] for i in update.order], notes.append) for index, update in enumerate(updates)
        ]
        whole = concatenate([update.batch for update in done])
        measured = diagnose(whole, self._spec)
        notes += [f"step {step}: {remark}" for remark in remarks(measured, self._spec)]
        account = (dropped or Account()) + account
        record = step_record(step, groups, lags, account, done, whole, measured, self._spec, self._reference_version)
        if any(update.applied for update in done):
            beta = next_beta(self._config.objective.kl, self._spec.beta, step, measured.kl_reference)
            self._spec = replace(self._spec, beta=beta)
        self.version = step
        if (every := self._config.objective.kl.reference_every) and self._reads_reference and step % every == 0:
            self._ranks.renew_reference()
            # What was computed of the one before is no longer true.
            self._reference_version, self._last_batch = step, []
        return record, notes

    @property
    def is_new(self) -> bool:
        """Whether no step has changed anything yet: then there is no state worth saving."""
        return not self._ranks.own.backend.optimizer.state

    def state(self) -> TrainerState:
        """What `load_state` goes on from. Of one rank the tensors are the living ones, which the next step changes."""
        values = {
            "version": self.version,
            "beta": self._spec.beta,
            "skipped_in_a_row": self._skipped_in_a_row,
            "reference_version": self._reference_version,
        }
        return TrainerState(self._ranks.state(), values)

    def load_state(self, state: TrainerState) -> None:
        """Go on from what another trainer of the same configuration, with any number of ranks, said of itself."""
        self._ranks.load_state(state.tensors)
        self.version = int(state.values["version"])
        self._spec = replace(self._spec, beta=float(state.values["beta"]))
        self._skipped_in_a_row = int(state.values["skipped_in_a_row"])
        self._reference_version = int(state.values["reference_version"])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights by name, gathered one after the other. To be read to the end."""
        return self._ranks.weights()

    def compare(self, groups: Sequence[Group]) -> Gap:
        """How far an engine's log-probs of these groups are from the current policy's."""
        return self._ranks.compare(groups, self.version)

    def save(self, folder: Path) -> None:
        """Write the current policy, with its tokenizer, as a Hugging Face folder; an adapter merged, and beside it."""
        model = self._config.model
        if self._config.learner.lora is not None:
            export(load_model(self._config, torch.device("cpu")), dict(self.weights()), self._config, folder)
        else:
            whole = dict(self.weights()) if self._config.learner.ranks > 1 else None
            self.policy.model.save_pretrained(folder, state_dict=whole)  # type: ignore[operator]
        AutoTokenizer.from_pretrained(
            model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
        ).save_pretrained(folder)

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()

    def _update(self, index: int, groups: Sequence[Group], tell: Callable[[str], None]) -> UpdateResult:
        """One optimizer step, on these groups."""
        kept = [t for group in groups for t in scored(group)]
        tokens = sum(int(loss_mask(t).sum()) for t in kept)
        divisor = normalizer(self._spec.reduction, len(kept), tokens, self._length_constant)
        parts = self._ranks.accumulate(index, self._spec, divisor)
        batch = concatenate([part.batch for part in parts if part.batch is not None])
        loss, entropy = sum(part.loss for part in parts), sum(part.entropy for part in parts)
        rate = self._learning_rate()
        if self._config.objective.importance.scale_learning_rate:
            rate *= learning_rate_scale(batch)
        if not (something := bool(batch.trained.any())):
            rate = 0.0  # Momentum alone must not move weights.
            tell(f"step {self.version + 1}: nothing is left to train, weights stay as they are")
        norm = self._ranks.apply(rate)
        if not (finite := math.isfinite(norm)):
            tell(self._skip(loss, diagnose(batch, self._spec).kl_behavior_k3))
        elif something:
            self._skipped_in_a_row = 0
        return UpdateResult(batch, loss, entropy, norm, rate, something and finite)

    def _learning_rate(self) -> float:
        learner = self._config.learner
        return learning_rate(
            self.version,
            peak=learner.lr,
            warmup_steps=learner.warmup_steps,
            schedule=learner.schedule,
            last_step=learner.schedule_steps or self._config.run.steps,
            floor=learner.lr_floor,
        )

    def _skip(self, loss: float, kl_behavior: float) -> str:
        found = (
            f"the gradient of step {self.version + 1} is not finite (loss {loss:g}, KL(mu||pi) {kl_behavior:g} a token)"
        )
        advice = (
            "lower learner.lr if that KL rose from step to step; if it did not, the model itself overflows or holds "
            "numbers that are not finite"
        )
        if not self._ranks.own.backend.skips:
            raise RunFailed(f"{found}, and learner.backend={self._config.learner.backend} cannot skip it: {advice}")
        if self._skipped_in_a_row == (most := self._config.learner.max_skipped_steps):
            raise RunFailed(f"{found}, after {most} such steps in a row (learner.max_skipped_steps): {advice}")
        self._skipped_in_a_row += 1
        return f"{found}: the step is skipped, its groups are used up"

    def _lags(self, entries: Sequence[Entry], shares: Shares) -> TokenLags:
        version, max_lag = self.version, self._config.admission.max_lag
        lags = lags_of(entries, version, shares, recomputed=self._config.weight_sync.caches_are_recomputed)
        if self._rule.keeps_bound and (largest := lags.total.max(initial=0)) > max_lag:
            raise RunFailed(f"step {version + 1} got a token of lag {largest}, admission.max_lag is {max_lag:g}")
        return lags
