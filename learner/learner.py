"""The learner: takes batches of groups from the buffer, makes one policy version after the other, stages them for sync.

One torch process. Groups flow in through a `Consumer`; step records, and weights in shared memory, flow out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from counterflow.buffer.archive import Archive
from counterflow.buffer.connection import Address
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.reading import Reading
from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Group, Origin
from counterflow.configs.schema import RunConfig
from counterflow.errors import RunFailed
from counterflow.learner.batch import Microbatch, lags_of, microbatches
from counterflow.learner.canary import measure
from counterflow.learner.objective.diagnostics import diagnose, remarks
from counterflow.learner.objective.loss import normalizer, policy_loss, token_weights
from counterflow.learner.objective.ratios import learning_rate_scale
from counterflow.learner.objective.types import Diagnostics, PolicyBatch, concatenate
from counterflow.learner.objective_choice import needs_reference, next_beta, objective_spec
from counterflow.learner.packing import scored
from counterflow.learner.policy import Policy, load_model, packing_of
from counterflow.processes import pin
from counterflow.records import Interval, StepRecord
from counterflow.weight_sync.canary import Gap
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.lag import TokenLags, mean, weighted_histogram
from counterflow.weight_sync.layout import Layout, lay_out, named_weights
from counterflow.weight_sync.publisher import Shipment, StagedVersion
from counterflow.weight_sync.transports import open_publisher


@dataclass(frozen=True)
class StepResult:
    """What one step sends to the supervisor."""

    record: StepRecord
    intervals: list[Interval]
    notes: list[str]
    """What the run's owner should know."""


class Learner:
    """The policy, its optimizer and the buffer's consumer.

    Args:
        folder: the run folder, where consumed groups are archived.
        cores: CPU cores to stay on; None leaves the choice to the system.
        started_at: Unix time of the run's start, the zero of all times reported.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        address: Address,
        origin: Origin,
        started_at: float,
        cores: Sequence[int] | None,
    ) -> None:
        if cores:
            pin(cores)
        if not config.learner.gpus:
            torch.set_num_threads(config.learner.cpus)
        torch.manual_seed(config.run.seed)
        self._config, self._started_at = config, started_at
        device = torch.device("cuda" if config.learner.gpus else "cpu")
        model = load_model(config, device)
        reference = load_model(config, device).requires_grad_(False) if needs_reference(config) else None
        self._packing = packing_of(config, model)
        self._policy = Policy(
            model, reference, config.sampling.temperature, getattr(torch, config.learner.dtype), device
        )
        self._device = device
        self._pad_token_id = int(model.config.pad_token_id or 0)  # type: ignore[union-attr, arg-type]
        learner = config.learner
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True
        )
        warmup = max(learner.warmup_steps, 1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda s: min((s + 1) / warmup, 1.0))
        self._spec = objective_spec(config)
        self._length_constant = config.objective.length_constant or config.sampling.max_tokens
        archive = Archive(folder / "archive", origin, segment_bytes=config.buffer.archive_segment_bytes)
        self._notes: list[str] = []
        self._consumer = Consumer(address, origin, archive, _reading(config), self._notes.append)
        dtype = getattr(torch, config.actors.dtype)
        self._publisher = open_publisher(config, lay_out(named_weights(model), dtype), folder)

    def layout(self) -> Layout:
        """What a version consists of, for actors."""
        return self._publisher.layout

    def stage(self, slot: int) -> StagedVersion:
        """Copy the current weights into `slot`, out of the way of the next step."""
        return self._publisher.stage(self._consumer.version, slot, named_weights(self._policy.model))

    def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        """Make a staged version ready for these actors. May run beside a step, as `send` may."""
        return self._publisher.prepare(staged, actors)

    def send(self, staged: StagedVersion) -> Fingerprints:
        """Bring a prepared version to its actors, while they load it; returns what they must hold then."""
        return self._publisher.send(staged)

    def step(self) -> StepResult:
        """Wait for a batch, take one optimizer step on it, commit both together.

        Raises:
            DeadlineExceeded: the batch is not complete within `run.step_timeout_s`.
            RunFailed: the gradient is not finite, or a token is staler than `admission.max_lag` allows.
        """
        waiting = self._now()
        entries = self._consumer.take(self._config.admission.groups_per_step, self._config.run.step_timeout_s)
        training = self._now()
        record = self._train(entries)
        version = self._consumer.version + 1
        self._consumer.commit(entries, version)
        ledger = self._consumer.ledger()
        end = self._now()
        record = replace(
            record,
            step=version,
            policy_version=version,
            time_s=end,
            wait_s=training - waiting,
            train_s=end - training,
            tokens_generated=ledger.tokens_generated,
            learner_tokens_per_s=record.tokens / (end - training),
            buffer_groups=ledger.buffered,
        )
        notes = self._notes.copy()
        self._notes.clear()
        intervals = [Interval("learner", "wait", waiting, training), Interval("learner", "train", training, end)]
        return StepResult(record, intervals, notes)

    def compare(self, groups: Sequence[Group]) -> Gap:
        """How far an engine's log-probs of these groups are from the current policy's."""
        tokens = self._config.learner.microbatch_tokens
        return measure(self._policy, groups, self._consumer.version, tokens, self._pad_token_id, self._packing)

    def save(self, folder: Path) -> None:
        """Write the current policy, with its tokenizer, as a Hugging Face folder."""
        model = self._config.model
        self._policy.model.save_pretrained(folder)  # type: ignore[operator]
        AutoTokenizer.from_pretrained(
            model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
        ).save_pretrained(folder)

    def close(self) -> None:
        """Remove the staged weights and leave the buffer."""
        self._publisher.close()
        self._consumer.close()

    def _now(self) -> float:
        return time.time() - self._started_at

    def _train(self, entries: Sequence[Entry]) -> StepRecord:
        groups = [entry.group for entry in entries]
        lags = self._lags(entries)
        batches = microbatches(groups, self._config.learner.microbatch_tokens, self._pad_token_id, self._packing)
        sequences = sum(len(batch.rewards) for batch in batches)
        tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        scale = normalizer(self._spec.reduction, sequences, tokens, self._length_constant)
        self._optimizer.zero_grad(set_to_none=True)
        done: list[PolicyBatch] = []
        loss_sum, entropy_sum = 0.0, 0.0
        for batch in batches:
            policy_batch, entropies = self._policy_batch(batch)
            loss = policy_loss(policy_batch, self._spec, scale)
            loss.backward()  # type: ignore[no-untyped-call]
            done.append(policy_batch)
            loss_sum += float(loss.detach())
            entropy_sum += float(entropies[policy_batch.loss_mask].sum())
        whole = concatenate(done)
        measured = diagnose(whole, self._spec)
        self._notes += [f"step {self._consumer.version + 1}: {remark}" for remark in remarks(measured, self._spec)]
        learning_rate = float(self._schedule.get_last_lr()[0])
        if self._config.objective.importance.scale_learning_rate:
            learning_rate *= learning_rate_scale(whole)
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = learning_rate
        norm = torch.nn.utils.clip_grad_norm_(self._policy.model.parameters(), self._config.learner.max_grad_norm)
        if not torch.isfinite(norm):
            raise RunFailed(
                f"the gradient of step {self._consumer.version + 1} is not finite (loss {loss_sum:g}, KL(mu||pi) "
                f"{measured.kl_behavior_k3:g} a token): lower learner.lr if that KL rose from step to step; if it did "
                "not, the model itself overflows or holds numbers that are not finite"
            )
        self._optimizer.step()
        self._schedule.step()
        weights = token_weights(whole, self._spec)[whole.loss_mask].double().cpu().numpy()
        record = self._record(groups, lags, weights, measured, loss_sum, entropy_sum, float(norm), learning_rate)
        beta = next_beta(self._config.objective.kl, self._spec.beta, self._consumer.version + 1, measured.kl_reference)
        self._spec = replace(self._spec, beta=beta)
        return record

    def _policy_batch(self, batch: Microbatch) -> tuple[PolicyBatch, torch.Tensor]:
        reference: torch.Tensor | None
        divergences = None
        if self._spec.needs_divergence:
            found, reference = self._policy.statistics(batch)
            logprobs, entropies, divergences = found.logprobs, found.entropies.detach(), found.divergences
        else:
            logprobs, entropies = self._policy.logprobs(batch)
            reference = self._policy.reference_logprobs(batch)
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

    def _lags(self, entries: Sequence[Entry]) -> TokenLags:
        version, max_lag = self._consumer.version, self._config.admission.max_lag
        lags = lags_of(entries, version, recomputed=self._config.weight_sync.caches_are_recomputed)
        if (largest := lags.total.max(initial=0)) > max_lag:
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
            step=0,
            policy_version=0,
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
            response_tokens_mean=tokens / len(trained),
            wait_s=0.0,
            train_s=0.0,
            tokens_generated=0,
            learner_tokens_per_s=0.0,
            actors_tokens_per_s=0.0,
            buffer_groups=0,
            publish_debt=0,
        )


def _reading(config: RunConfig) -> Reading:
    return Reading(
        order=config.buffer.order,
        uses=config.buffer.uses,
        max_lag=config.admission.max_lag,
        drop_equal_rewards=config.buffer.drop_equal_rewards,
    )
