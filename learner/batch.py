"""From groups to tensors: microbatches of whole groups, packed or padded, with the place of every response token.

Groups flow in from the buffer, `Microbatch`es flow out to the policy, the lag of what they train to the record.
Knows numpy and torch, not the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import BoolArray, Group, Trajectory
from counterflow.learner.packing import Packing, lengths_of, place, scored, split
from counterflow.learner.staleness import Shares
from counterflow.weight_sync.lag import TokenLags, group_lags, trained_lags


@dataclass(frozen=True)
class Microbatch:
    """Whole groups. [tokens] are the response tokens of all sequences, in the order of the groups."""

    input_ids: Tensor
    """int64 [rows, length]: prompts and responses, padded on the right."""
    position_ids: Tensor | None
    """int64 [rows, length]: place within the sequence, from 0 at each one's start, which is how transformers tells
    sequences of a row apart. None where every row holds one."""
    predictors: Tensor
    """int64 [tokens]: flat index into [rows x length] of the position that predicts each response token."""
    targets: Tensor
    """int64 [tokens]: the response tokens."""
    behavior_logprobs: Tensor
    """float32 [tokens]."""
    loss_mask: Tensor
    """bool [tokens]: whether the token is trained."""
    sequence: Tensor
    """int64 [tokens]: index of each token's sequence."""
    rewards: Tensor
    """float32 [sequences]."""
    group: Tensor
    """int64 [sequences]: admission number."""


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


def microbatches(
    groups: Sequence[Group], max_tokens: int, pad_token_id: int, packing: Packing = Packing.PADDED
) -> list[Microbatch]:
    """Groups, in order, as microbatches of at most `max_tokens` tokens (see `split`); a larger group stands alone."""
    return [collate(part, pad_token_id, packing) for part in split(groups, max_tokens, packing)]


def collate(groups: Sequence[Group], pad_token_id: int, packing: Packing) -> Microbatch:
    """One microbatch of these groups. Of none: a single token of padding and nothing to train."""
    rows = [(group, trajectory) for group in groups for trajectory in scored(group)]
    lengths = [length for group in groups for length in lengths_of(group)] or [1]
    places = place(lengths, packing)
    height = 1 + max(row for row, _ in places)
    width = max(start + length for (_, start), length in zip(places, lengths, strict=True))
    input_ids = np.full((height, width), pad_token_id, np.int64)
    # Padding goes on counting: a part of the last sequence of its row, whose tokens never see it.
    position_ids = np.tile(np.arange(width), (height, 1))
    for row, start in sorted(places):
        position_ids[row, start:] = np.arange(width - start)
    predictors = [np.zeros(0, np.int64)]
    for (row, start), (group, trajectory) in zip(places, rows, strict=False):
        prompt, response = len(group.prompt_token_ids), len(trajectory.response_token_ids)
        input_ids[row, start : start + prompt] = group.prompt_token_ids
        input_ids[row, start + prompt : start + prompt + response] = trajectory.response_token_ids
        predictors.append(np.arange(prompt - 1, prompt + response - 1) + row * width + start)
    kept = [t for _, t in rows]
    counts = [len(t.response_token_ids) for t in kept]
    return Microbatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids) if len(places) > height else None,
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=torch.from_numpy(_joined([t.response_token_ids for t in kept], np.int64)),
        behavior_logprobs=torch.from_numpy(_joined([t.behavior_logprobs for t in kept], np.float32)),
        loss_mask=torch.from_numpy(_joined([loss_mask(t) for t in kept], np.bool_)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        rewards=torch.tensor([t.reward for t in kept], dtype=torch.float32),
        group=torch.tensor([g.admission for g, _ in rows], dtype=torch.int64),
    )


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
