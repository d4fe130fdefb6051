"""From groups to tensors: microbatches of whole groups, right-padded, with the place of every response token.

Groups flow in from the buffer, `Microbatch`es flow out to the policy, the lag of what they train to the record.
Knows numpy and torch, not the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import BoolArray, Group, Trajectory
from counterflow.learner.staleness import Shares
from counterflow.weight_sync.lag import TokenLags, group_lags, trained_lags


@dataclass(frozen=True)
class Microbatch:
    """Whole groups, one row a sequence. [tokens] are the response tokens of all rows, in row order."""

    input_ids: Tensor
    """int64 [sequences, length]: prompt and response, padded on the right."""
    predictors: Tensor
    """int64 [tokens]: flat index into [sequences x length] of the position that predicts each response token."""
    targets: Tensor
    """int64 [tokens]: the response tokens."""
    behavior_logprobs: Tensor
    """float32 [tokens]."""
    loss_mask: Tensor
    """bool [tokens]: whether the token is trained."""
    sequence: Tensor
    """int64 [tokens]: row of each token."""
    rewards: Tensor
    """float32 [sequences]."""
    group: Tensor
    """int64 [sequences]: admission number."""


def scored(group: Group) -> list[Trajectory]:
    """The trajectories of a group whose reward did not fail."""
    return [t for t in group.trajectories if t.reward is not None]


def loss_mask(trajectory: Trajectory) -> BoolArray:
    """Which response tokens are trained, bool [response]."""
    if trajectory.loss_mask is not None:
        return trajectory.loss_mask
    return np.ones(len(trajectory.response_token_ids), np.bool_)


def lags_of(entries: Sequence[Entry], learner_version: int, shares: Shares, *, recomputed: bool) -> TokenLags:
    """The lags of the tokens that a step on these entries trains, in the order of its microbatches.

    Args:
        shares: what is left of every token's loss, [tokens]; those of which nothing is left are not trained.
        recomputed: whether actors recompute the key-value cache of running requests at each update.

    Raises:
        ValueError: a token comes from a version that the learner has not made.
    """
    groups = [
        group_lags(
            [t.version_spans for t in scored(entry.group)], entry.passage, learner_version, recomputed=recomputed
        )
        for entry in entries
    ]
    masks = [loss_mask(t) for entry in entries for t in scored(entry.group)]
    return trained_lags(groups, np.concatenate(masks) & (shares > 0))


def microbatches(groups: Sequence[Group], max_tokens: int, pad_token_id: int) -> list[Microbatch]:
    """Pack groups, in order, into microbatches of at most `max_tokens` padded tokens; a larger group stands alone."""
    result: list[Microbatch] = []
    pending: list[Group] = []
    rows, longest = 0, 0
    for group in groups:
        kept = scored(group)
        length = max((len(group.prompt_token_ids) + len(t.response_token_ids) for t in kept), default=0)
        if rows and (rows + len(kept)) * max(longest, length) > max_tokens:
            result.append(_collate(pending, pad_token_id))
            pending, rows, longest = [], 0, 0
        pending.append(group)
        rows, longest = rows + len(kept), max(longest, length)
    if rows:
        result.append(_collate(pending, pad_token_id))
    return result


def _collate(groups: Sequence[Group], pad_token_id: int) -> Microbatch:
    rows = [(group, trajectory) for group in groups for trajectory in scored(group)]
    length = max(len(g.prompt_token_ids) + len(t.response_token_ids) for g, t in rows)
    input_ids = np.full((len(rows), length), pad_token_id, np.int64)
    predictors = []
    for row, (group, trajectory) in enumerate(rows):
        prompt, response = len(group.prompt_token_ids), len(trajectory.response_token_ids)
        input_ids[row, :prompt] = group.prompt_token_ids
        input_ids[row, prompt : prompt + response] = trajectory.response_token_ids
        predictors.append(np.arange(prompt - 1, prompt + response - 1) + row * length)
    counts = [len(t.response_token_ids) for _, t in rows]
    return Microbatch(
        input_ids=torch.from_numpy(input_ids),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=torch.from_numpy(np.concatenate([t.response_token_ids for _, t in rows]).astype(np.int64)),
        behavior_logprobs=torch.from_numpy(np.concatenate([t.behavior_logprobs for _, t in rows])),
        loss_mask=torch.from_numpy(np.concatenate([loss_mask(t) for _, t in rows])),
        sequence=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        rewards=torch.tensor([t.reward for _, t in rows], dtype=torch.float32),
        group=torch.tensor([g.admission for g, _ in rows], dtype=torch.int64),
    )
