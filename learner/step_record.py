"""The record of one step: what was measured of its groups, tokens and updates, and nothing of the clock or the buffer.

Groups, lags, accounts and updates flow in, a `StepRecord` flows out. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from counterflow.buffer.trajectory import Group
from counterflow.learner.batch import loss_mask
from counterflow.learner.objective.loss import token_weights
from counterflow.learner.objective.spec import ObjectiveSpec
from counterflow.learner.objective.types import Diagnostics, PolicyBatch
from counterflow.learner.packing import scored
from counterflow.learner.verdict import Account
from counterflow.records import StepRecord
from counterflow.weight_sync.lag import TokenLags, mean, weighted_histogram


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did; a step of the learner makes one or several."""

    batch: PolicyBatch
    loss: float
    entropy: float
    """Sum over the trained tokens."""
    norm: float
    """Of the gradient, before clipping."""
    learning_rate: float
    applied: bool
    """Whether there was a token to train and a finite gradient."""


def step_record(
    step: int,
    groups: Sequence[Group],
    lags: TokenLags,
    account: Account,
    updates: Sequence[UpdateResult],
    whole: PolicyBatch,
    measured: Diagnostics,
    spec: ObjectiveSpec,
    reference_version: int,
) -> StepRecord:
    """The record, with zeros for times and for what only the buffer and the supervisor know.

    Args:
        lags: of the trained tokens, in the order of `whole`.
        whole: the batches of all updates, one after the other.
        measured: of `whole`, under `spec`.
    """
    kept = [t for group in groups for t in scored(group)]
    tokens = len(lags.total)
    total = lags.total if tokens else np.zeros(1, np.int64)
    weights = token_weights(whole, spec)[whole.trained].double().cpu().numpy()
    return StepRecord(
        step=step,
        policy_version=step,
        time_s=0.0,
        groups=len(groups),
        sequences=len(kept),
        tokens=tokens,
        reward_mean=float(np.mean([t.reward for t in kept])),
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
        truncated_responses=float(np.mean([t.finish_reason == "length" for t in kept])),
        failed_samples=sum(len(g.trajectories) for g in groups) - len(kept),
        response_tokens_mean=float(np.mean([loss_mask(t).sum() for t in kept])),
        wait_s=0.0,
        train_s=0.0,
        tokens_generated=0,
        learner_tokens_per_s=0.0,
        actors_tokens_per_s=0.0,
        buffer_groups=0,
        publish_debt=0,
        offered_tokens=[int(n) for n in account.offered_tokens],
        trained_tokens=list(account.trained_tokens),
        stale_groups=[int(n) for n in account.stale_groups],
        stale_samples=[int(n) for n in account.stale_samples],
        stale_tokens=[int(n) for n in account.stale_tokens],
        skipped_updates=sum(not np.isfinite(update.norm) for update in updates),
        reference_version=reference_version,
    )
