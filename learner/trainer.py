"""The trainer: a policy, its optimizer and its objective; takes the groups of one step, makes one version of them.

Deterministic: the same start and the same groups in the same order make the same weights, bit for bit on a CPU in
float32. So a run is its archive. Knows neither the buffer's server nor weight sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoTokenizer

from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Group
from counterflow.configs.schema import RunConfig
from counterflow.errors import RunFailed
from counterflow.learner.batch import Microbatch, lags_of, loss_mask, microbatches, scored
from counterflow.learner.objective.diagnostics import diagnose, remarks
from counterflow.learner.objective.loss import normalizer, policy_loss, token_weights
from counterflow.learner.objective.ratios import learning_rate_scale
from counterflow.learner.objective.types import Diagnostics, PolicyBatch, concatenate
from counterflow.learner.objective_choice import needs_reference, next_beta, objective_spec
from counterflow.learner.policy import Policy, load_model
from counterflow.learner.schedule import learning_rate
from counterflow.learner.staleness import Rule, Shares
from counterflow.learner.verdict import Account, judge
from counterflow.records import StepRecord
from counterflow.weight_sync.lag import TokenLags, mean, weighted_histogram


@dataclass(frozen=True)
class TrainerState:
    """All that a version consists of, beside the configuration.

    `tensors` is nested: weights and the optimizer's moments by parameter name, and the state of the random generator.
    """

    tensors: dict[str, Any]
    values: dict[str, float | int]
    """Plain numbers: the version, beta, and the steps skipped in a row."""


class Trainer:
    """Makes one version after the other; `version` counts the steps taken.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: RunConfig) -> None:
        if not config.learner.gpus:
            torch.set_num_threads(config.learner.cpus)
        torch.manual_seed(config.run.seed)
        self._config = config
        self._device = torch.device("cuda" if config.learner.gpus else "cpu")
        model = load_model(config, self._device)
        reference = load_model(config, self._device).requires_grad_(False) if needs_reference(config) else None
        precision = getattr(torch, config.learner.dtype)
        self.policy = Policy(model, reference, config.sampling.temperature, precision, self._device)
        self.pad_token_id = int(model.config.pad_token_id or 0)  # type: ignore[union-attr, arg-type]
        learner = config.learner
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True
        )
        self._spec = objective_spec(config)
        self._length_constant = config.objective.length_constant or config.sampling.max_tokens
        self._rule = rule_of(config)
        self._skipped_in_a_row = 0
        self.version = 0

    def train(self, entries: Sequence[Entry], dropped: Account | None = None) -> tuple[StepRecord, list[str]]:
        """Take the optimizer step that makes the next version; its record, and remarks on it.

        A step whose gradient is not finite leaves weights and optimizer as they are, and counts as taken: its groups
        are used up, and replay skips it, too. After `learner.max_skipped_steps` such steps in a row the next one fails.

        Args:
            dropped: an account of the groups that were dropped as stale since the step before, for the record.

        Raises:
            RunFailed: one skipped step too many, or a token is staler than `admission.max_lag` allows.
        """
        groups, step = [entry.group for entry in entries], self.version + 1
        shares, account = judge(
            groups, self.version, self._rule, mask_truncated=self._config.reward.truncated == "mask"
        )
        lags = self._lags(entries, shares)
        batches = microbatches(groups, self._config.learner.microbatch_tokens, self.pad_token_id)
        sequences = sum(len(batch.rewards) for batch in batches)
        tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        scale = normalizer(self._spec.reduction, sequences, tokens, self._length_constant)
        self._optimizer.zero_grad(set_to_none=True)
        done: list[PolicyBatch] = []
        loss_sum, entropy_sum = 0.0, 0.0
        by_batch = torch.split(torch.from_numpy(shares), [len(batch.targets) for batch in batches])
        for batch, share in zip(batches, by_batch, strict=True):
            policy_batch, entropies = self._policy_batch(batch)
            if (shares < 1).any():
                policy_batch = replace(policy_batch, share=share.to(self._device))
            loss = policy_loss(policy_batch, self._spec, scale)
            loss.backward()  # type: ignore[no-untyped-call]
            done.append(policy_batch)
            loss_sum += float(loss.detach())
            entropy_sum += float(entropies[policy_batch.trained].sum())
        whole = concatenate(done)
        measured = diagnose(whole, self._spec)
        notes = [f"step {step}: {remark}" for remark in remarks(measured, self._spec)]
        rate = self._learning_rate(whole)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self._config.learner.max_grad_norm)
        if not (finite := bool(torch.isfinite(norm))):
            notes.append(self._skip(loss_sum, measured.kl_behavior_k3))
        elif len(lags.total):
            self._update(rate, measured.kl_reference)
        else:
            # Momentum alone must not move weights.
            notes.append(f"step {step}: nothing is left to train, weights stay as they are")
        self.version = step
        weights = token_weights(whole, self._spec)[whole.trained].double().cpu().numpy()
        record = self._record(groups, lags, weights, measured, loss_sum, entropy_sum, float(norm), rate)
        account = (dropped or Account()) + account
        record = replace(
            record,
            offered_tokens=[int(n) for n in account.offered_tokens],
            trained_tokens=list(account.trained_tokens),
            stale_groups=[int(n) for n in account.stale_groups],
            stale_samples=[int(n) for n in account.stale_samples],
            stale_tokens=[int(n) for n in account.stale_tokens],
            skipped_updates=int(not finite),
        )
        return record, notes

    @property
    def is_new(self) -> bool:
        """Whether no step has changed anything yet: then there is no state worth saving."""
        return not self._optimizer.state

    def state(self) -> TrainerState:
        """What `load_state` goes on from. The tensors are the living ones, which the next step changes."""
        tensors: dict[str, Any] = {
            "model": get_model_state_dict(self.policy.model),
            "optimizer": get_optimizer_state_dict(self.policy.model, self._optimizer)["state"],
            "random": {"cpu": torch.get_rng_state()},
        }
        if self._device.type == "cuda":
            tensors["random"]["cuda"] = torch.cuda.get_rng_state(self._device)
        values = {"version": self.version, "beta": self._spec.beta, "skipped_in_a_row": self._skipped_in_a_row}
        return TrainerState(tensors, values)

    def load_state(self, state: TrainerState) -> None:
        """Go on from what another trainer of the same configuration said of itself."""
        model, tensors = self.policy.model, state.tensors
        set_model_state_dict(model, tensors["model"])
        groups = get_optimizer_state_dict(model, self._optimizer)["param_groups"]
        set_optimizer_state_dict(
            model, self._optimizer, optim_state_dict={"state": tensors["optimizer"], "param_groups": groups}
        )
        torch.set_rng_state(tensors["random"]["cpu"])
        if "cuda" in tensors["random"]:
            torch.cuda.set_rng_state(tensors["random"]["cuda"], self._device)
        self.version = int(state.values["version"])
        self._spec = replace(self._spec, beta=float(state.values["beta"]))
        self._skipped_in_a_row = int(state.values["skipped_in_a_row"])

    def save(self, folder: Path) -> None:
        """Write the current policy, with its tokenizer, as a Hugging Face folder."""
        model = self._config.model
        self.policy.model.save_pretrained(folder)  # type: ignore[operator]
        AutoTokenizer.from_pretrained(
            model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
        ).save_pretrained(folder)

    def _learning_rate(self, whole: PolicyBatch) -> float:
        learner = self._config.learner
        rate = learning_rate(
            self.version,
            peak=learner.lr,
            warmup_steps=learner.warmup_steps,
            schedule=learner.schedule,
            last_step=learner.schedule_steps or self._config.run.steps,
            floor=learner.lr_floor,
        )
        return rate * learning_rate_scale(whole) if self._config.objective.importance.scale_learning_rate else rate

    def _update(self, rate: float, kl_reference: float) -> None:
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = rate
        self._optimizer.step()
        self._skipped_in_a_row = 0
        beta = next_beta(self._config.objective.kl, self._spec.beta, self.version + 1, kl_reference)
        self._spec = replace(self._spec, beta=beta)

    def _skip(self, loss: float, kl_behavior: float) -> str:
        found = (
            f"the gradient of step {self.version + 1} is not finite (loss {loss:g}, KL(mu||pi) {kl_behavior:g} a token)"
        )
        if self._skipped_in_a_row == (most := self._config.learner.max_skipped_steps):
            raise RunFailed(
                f"{found}, after {most} such steps in a row (learner.max_skipped_steps): lower learner.lr if that KL "
                "rose from step to step; if it did not, the model itself overflows or holds numbers that are not finite"
            )
        self._skipped_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        return f"{found}: the step is skipped, its groups are used up"

    def _policy_batch(self, batch: Microbatch) -> tuple[PolicyBatch, Tensor]:
        reference: Tensor | None
        divergences = None
        if self._spec.needs_divergence:
            found, reference = self.policy.statistics(batch)
            logprobs, entropies, divergences = found.logprobs, found.entropies.detach(), found.divergences
        else:
            logprobs, entropies = self.policy.logprobs(batch)
            reference = self.policy.reference_logprobs(batch)
        policy_batch = PolicyBatch(
            logprobs=logprobs,
            behavior_logprobs=batch.behavior_logprobs.to(self._device),
            reference_logprobs=reference,
            # A batch is trained by one optimizer step, so pi is still the policy of the step's start: no forward.
            proximal_logprobs=logprobs.detach() if self._spec.needs_proximal else None,
            loss_mask=batch.loss_mask.to(self._device),
            sequence=batch.sequence.to(self._device),
            rewards=batch.rewards.to(self._device),
            group=batch.group.to(self._device),
            reference_divergence=divergences,
        )
        return policy_batch, entropies

    def _lags(self, entries: Sequence[Entry], shares: Shares) -> TokenLags:
        version, max_lag = self.version, self._config.admission.max_lag
        lags = lags_of(entries, version, shares, recomputed=self._config.weight_sync.caches_are_recomputed)
        if self._rule.keeps_bound and (largest := lags.total.max(initial=0)) > max_lag:
            raise RunFailed(f"step {version + 1} got a token of lag {largest}, admission.max_lag is {max_lag:g}")
        return lags

    def _record(
        self,
        groups: Sequence[Group],
        lags: TokenLags,
        weights: npt.NDArray[np.float64],
        measured: Diagnostics,
        loss: float,
        entropy: float,
        norm: float,
        rate: float,
    ) -> StepRecord:
        trained = [t for group in groups for t in scored(group)]
        tokens = len(lags.total)
        total = lags.total if tokens else np.zeros(1, np.int64)
        return StepRecord(
            step=self.version,
            policy_version=self.version,
            time_s=0.0,
            groups=len(groups),
            sequences=len(trained),
            tokens=tokens,
            reward_mean=float(np.mean([t.reward for t in trained])),
            lag_mean=mean(total),
            lag_p50=float(np.percentile(total, 50)),
            lag_p95=float(np.percentile(total, 95)),
            lag_max=int(total.max()),
            lag_in_flight_mean=mean(lags.in_flight),
            lag_in_queue_mean=mean(lags.in_queue),
            lag_in_learner_mean=mean(lags.in_learner),
            lag_histogram=np.bincount(lags.total).tolist(),
            lag_histogram_weighted=weighted_histogram(lags.total, weights),
            cache_age_mean=mean(lags.cache_age),
            kl_reference=measured.kl_reference,
            kl_behavior_k1=measured.kl_behavior_k1,
            kl_behavior_k3=measured.kl_behavior_k3,
            ess_token=measured.ess_token,
            ess_sequence=measured.ess_sequence,
            chi2=measured.chi2,
            truncated_weights=measured.truncated_weights,
            entropy=entropy / max(tokens, 1),
            grad_norm=norm,
            learning_rate=rate,
            loss=loss,
            zero_signal_groups=measured.zero_signal_groups,
            truncated_responses=float(np.mean([t.finish_reason == "length" for t in trained])),
            failed_samples=sum(len(g.trajectories) for g in groups) - len(trained),
            response_tokens_mean=float(np.mean([loss_mask(t).sum() for t in trained])),
            wait_s=0.0,
            train_s=0.0,
            tokens_generated=0,
            learner_tokens_per_s=0.0,
            actors_tokens_per_s=0.0,
            buffer_groups=0,
            publish_debt=0,
        )


def rule_of(config: RunConfig) -> Rule:
    """The staleness policy of a run."""
    admission = config.admission
    return Rule(admission.staleness, admission.max_lag, admission.decay)
