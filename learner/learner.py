"""The learner: takes batches of groups from the buffer, makes one policy version after the other, stages them for sync.

Rank 0 of one or several. Groups flow in through a `Consumer`; step records, and weights in shared memory, flow out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from counterflow.learner.batch import lags_of, loss_mask
from counterflow.learner.objective.diagnostics import diagnose, remarks
from counterflow.learner.objective.loss import normalizer, token_weights
from counterflow.learner.objective.ratios import learning_rate_scale
from counterflow.learner.objective.types import Diagnostics, PolicyBatch, concatenate
from counterflow.learner.objective_choice import next_beta, objective_spec
from counterflow.learner.packing import scored
from counterflow.learner.plan import plan
from counterflow.learner.ranks import Ranks, own_host
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


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did; a step of the learner makes one or several."""

    batch: PolicyBatch
    loss: float
    entropy: float
    """Sum over the trained tokens."""
    norm: float
    learning_rate: float


class Learner:
    """The policy, its optimizer and the buffer's consumer.

    Args:
        folder: the run folder, where consumed groups are archived.
        cores: CPU cores to stay on; None leaves the choice to the system.
        started_at: Unix time of the run's start, the zero of all times reported.
        followers: Ray actors of the other ranks (`Follower`).
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        address: Address,
        origin: Origin,
        started_at: float,
        cores: Sequence[int] | None,
        followers: Sequence[Any] = (),
    ) -> None:
        if cores:
            pin(cores)
        self._config, self._started_at = config, started_at
        learner = config.learner
        self._ranks = Ranks(config, followers, own_host() if followers else "127.0.0.1")
        self._policy, self._optimizer = self._ranks.own.policy, self._ranks.own.backend.optimizer
        self._trained: list[int] = []
        warmup = max(learner.warmup_steps, 1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda s: min((s + 1) / warmup, 1.0))
        self._spec = objective_spec(config)
        self._length_constant = config.objective.length_constant or config.sampling.max_tokens
        archive = Archive(folder / "archive", origin, segment_bytes=config.buffer.archive_segment_bytes)
        self._notes: list[str] = []
        self._consumer = Consumer(address, origin, archive, _reading(config), self._notes.append)
        dtype = getattr(torch, config.actors.dtype)
        self._publisher = open_publisher(config, lay_out(named_weights(self._policy.model), dtype), folder)

    def layout(self) -> Layout:
        """What a version consists of, for actors."""
        return self._publisher.layout

    def stage(self, slot: int) -> StagedVersion:
        """Copy the current weights into `slot`, out of the way of the next step."""
        return self._publisher.stage(self._consumer.version, slot, self._ranks.weights())

    def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        """Make a staged version ready for these actors. May run beside a step, as `send` may."""
        return self._publisher.prepare(staged, actors)

    def send(self, staged: StagedVersion) -> Fingerprints:
        """Bring a prepared version to its actors, while they load it; returns what they must hold then."""
        return self._publisher.send(staged)

    def step(self) -> StepResult:
        """Wait for a batch, take one optimizer step on it, or several, commit both together.

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
        return self._ranks.compare(groups, self._consumer.version)

    def save(self, folder: Path) -> None:
        """Write the current policy, with its tokenizer, as a Hugging Face folder."""
        model = self._config.model
        weights = dict(self._ranks.weights()) if self._config.learner.ranks > 1 else None
        self._policy.model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        AutoTokenizer.from_pretrained(
            model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
        ).save_pretrained(folder)

    def close(self) -> None:
        """Remove the staged weights and leave the buffer."""
        self._publisher.close()
        self._consumer.close()
        self._ranks.close()

    def _now(self) -> float:
        return time.time() - self._started_at

    def _train(self, entries: Sequence[Entry]) -> StepRecord:
        learner = self._config.learner
        groups = [entry.group for entry in entries]
        updates = plan(
            groups, learner.updates_per_batch, learner.ranks, learner.microbatch_tokens, self._ranks.own.packing
        )
        lags = self._lags([entries[index] for update in updates for index in update.order])
        admissions = [group.admission for group in groups]
        self._ranks.begin(updates, again=admissions == self._trained, needs_proximal=self._spec.needs_proximal)
        self._trained = admissions
        done = [self._update(index, [groups[i] for i in update.order]) for index, update in enumerate(updates)]
        self._schedule.step()
        whole = concatenate([update.batch for update in done])
        measured = diagnose(whole, self._spec)
        self._notes += [f"step {self._consumer.version + 1}: {remark}" for remark in remarks(measured, self._spec)]
        weights = token_weights(whole, self._spec)[whole.loss_mask].double().numpy()
        record = self._record(groups, lags, weights, measured, done)
        beta = next_beta(self._config.objective.kl, self._spec.beta, self._consumer.version + 1, measured.kl_reference)
        self._spec = replace(self._spec, beta=beta)
        return record

    def _update(self, index: int, groups: Sequence[Group]) -> UpdateResult:
        """One optimizer step, on these groups."""
        trained = [t for group in groups for t in scored(group)]
        tokens = sum(int(loss_mask(t).sum()) for t in trained)
        scale = normalizer(self._spec.reduction, len(trained), tokens, self._length_constant)
        parts = self._ranks.accumulate(index, self._spec, scale)
        batch = concatenate([part.batch for part in parts if part.batch is not None])
        loss = sum(part.loss for part in parts)
        learning_rate = float(self._schedule.get_last_lr()[0])
        if self._config.objective.importance.scale_learning_rate:
            learning_rate *= learning_rate_scale(batch)
        norm = self._ranks.apply(learning_rate)
        if not math.isfinite(norm):
            measured = diagnose(batch, self._spec)
            raise RunFailed(
                f"the gradient of step {self._consumer.version + 1} is not finite (loss {loss:g}, KL(mu||pi) "
                f"{measured.kl_behavior_k3:g} a token): lower learner.lr if that KL rose from step to step; if it did "
                "not, the model itself overflows or holds numbers that are not finite"
            )
        return UpdateResult(batch, loss, sum(part.entropy for part in parts), norm, learning_rate)

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
        updates: Sequence[UpdateResult],
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
            entropy=sum(update.entropy for update in updates) / max(tokens, 1),
            grad_norm=float(np.mean([update.norm for update in updates])),
            learning_rate=updates[-1].learning_rate,
            loss=float(np.mean([update.loss for update in updates])),
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
