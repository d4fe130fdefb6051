"""The verdict on a step's groups: what is left of each token's loss, and an account of it by length of prompt.

Groups flow in, shares flow out to the batches of the step, accounts to its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from counterflow.buffer.trajectory import Group
from counterflow.configs.schema import RunConfig
from counterflow.learner.batch import loss_mask
from counterflow.learner.packing import scored
from counterflow.learner.staleness import Rule, Shares, shares
from counterflow.lengths import added, bucket
from counterflow.weight_sync.lag import token_lags


@dataclass(frozen=True)
class Account:
    """Counts by bucket of prompt length; see `counterflow.lengths`. Tokens are those of the loss mask."""

    offered_tokens: Sequence[float] = ()
    """That came to be trained."""
    trained_tokens: Sequence[float] = ()
    """The same, each by its share."""
    stale_groups: Sequence[float] = ()
    """That the staleness policy touched."""
    stale_samples: Sequence[float] = ()
    stale_tokens: Sequence[float] = ()

    def __add__(self, other: Account) -> Account:
        return Account(*(added(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)))


def rule_of(config: RunConfig) -> Rule:
    """The staleness policy of a run."""
    admission = config.admission
    return Rule(admission.staleness, admission.max_lag, admission.decay)


def judge(groups: Sequence[Group], version: int, rule: Rule, *, mask_truncated: bool) -> tuple[Shares, Account]:
    """What a learner at `version` leaves of each token of the groups' scored responses, float32 [tokens], in order.

    Args:
        mask_truncated: leave nothing of responses that were cut at their longest length.

    Raises:
        ValueError: a token comes from a version that the learner has not made.
    """
    whole, account = [np.empty(0, np.float32)], Account()
    for group in groups:
        stale_samples = stale_tokens = offered = 0
        trained = 0.0
        for trajectory in scored(group):
            mask = loss_mask(trajectory)
            left = shares(token_lags(trajectory.version_spans, version), mask, rule)
            touched = int((mask & (left < 1)).sum())
            stale_tokens += touched
            stale_samples += touched > 0
            if mask_truncated and trajectory.finish_reason == "length":
                left = np.zeros_like(left)
            offered += int(mask.sum())
            trained += float(left[mask].sum(dtype=np.float64))
            whole.append(left)
        account += _account(group, offered, trained, int(stale_samples > 0), stale_samples, stale_tokens)
    return np.concatenate(whole), account


def account_of_dropped(group: Group) -> Account:
    """That of a group which was dropped as stale, whole."""
    kept = scored(group)
    tokens = sum(int(loss_mask(t).sum()) for t in kept)
    return _account(group, tokens, 0, 1, len(kept), tokens)


def _account(group: Group, *counts: float) -> Account:
    before = [0] * bucket(len(group.prompt_token_ids))
    return Account(*([*before, count] for count in counts))
