"""Each staleness policy against numbers worked by hand: what it leaves of a token, and what it says it did."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from groups import make_group

from counterflow.buffer.trajectory import Group, VersionSpan
from counterflow.learner.staleness import Order, Policy, Rule, shares
from counterflow.learner.verdict import Account, account_of_dropped, judge

LAGS = np.array([5, 4, 3, 2, 1])


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("wait", [1, 1, 1, 1, 1]),
        ("drop", [1, 1, 1, 1, 1]),
        ("mask_tokens", [0, 0, 1, 1, 1]),
        ("withhold_keep_baseline", [0, 0, 0, 0, 0]),
        ("downweight", [0.0625, 0.25, 1, 1, 1]),
    ],
)
def test_policy_leaves_another_share_of_a_token(policy: Policy, left: list[float]) -> None:
    found = shares(LAGS, np.ones(5, np.bool_), Rule(policy, max_lag=3, decay=0.25))
    assert found.tolist() == left and found.dtype == np.float32


@pytest.mark.parametrize("policy", ["mask_tokens", "withhold_keep_baseline", "downweight"])
def test_policy_touches_a_response_within_the_bound(policy: Policy) -> None:
    for max_lag in (5, math.inf):
        assert shares(LAGS, np.ones(5, np.bool_), Rule(policy, max_lag)).tolist() == [1] * 5


@pytest.mark.parametrize("policy", ["mask_tokens", "withhold_keep_baseline", "downweight"])
def test_token_outside_the_loss_mask_makes_a_response_stale(policy: Policy) -> None:
    mask = np.array([False, False, True, True, True])
    assert shares(LAGS, mask, Rule(policy, max_lag=3)).tolist() == [1] * 5


@pytest.mark.parametrize(
    ("policy", "order", "past"),
    [
        ("wait", "admission", math.inf),
        ("wait", "ready", 3),
        ("wait", "freshest", 3),
        ("drop", "admission", 3),
        ("drop", "ready", 3),
        ("mask_tokens", "ready", math.inf),
        ("withhold_keep_baseline", "ready", math.inf),
        ("downweight", "admission", math.inf),
    ],
)
def test_groups_are_dropped_by_a_policy_that_keeps_them(policy: Policy, order: Order, past: float) -> None:
    assert Rule(policy, max_lag=3).dropped_past(order) == past


def half_stale(prompt_tokens: int) -> Group:
    """Three responses of 4 tokens at version 9: the first has two tokens of lag 5, the third no reward."""
    group = make_group(samples=3, tokens=4, version=8)
    first, second, failed = group.trajectories
    first = dataclasses.replace(first, version_spans=(VersionSpan(4, 0, 2), VersionSpan(7, 2, 4)))
    failed = dataclasses.replace(failed, reward=None)
    prompt = np.arange(prompt_tokens, dtype=np.int32)
    return dataclasses.replace(group, prompt_token_ids=prompt, trajectories=(first, second, failed))


def test_account_counts_other_tokens_than_those_touched() -> None:
    groups = [half_stale(prompt_tokens=5), make_group(1, tokens=3, version=9), half_stale(prompt_tokens=8)]
    masked, account = judge(groups, 9, Rule("mask_tokens", max_lag=4), mask_truncated=False)
    assert masked.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, *[1] * 6, 0, 0, 1, 1, 1, 1, 1, 1]
    # A prompt of 4 tokens is in bucket 2, prompts of 5 and 8 in bucket 3.
    assert account == Account([0, 0, 6, 16], [0, 0, 6, 12], [0, 0, 0, 2], [0, 0, 0, 2], [0, 0, 0, 4])
    _, withheld = judge(groups, 9, Rule("withhold_keep_baseline", max_lag=4), mask_truncated=False)
    assert withheld == Account([0, 0, 6, 16], [0, 0, 6, 8], [0, 0, 0, 2], [0, 0, 0, 2], [0, 0, 0, 8])
    _, weighed = judge(groups, 9, Rule("downweight", max_lag=4, decay=0.25), mask_truncated=False)
    assert weighed == Account([0, 0, 6, 16], [0, 0, 6, 13], [0, 0, 0, 2], [0, 0, 0, 2], [0, 0, 0, 4])
    dropped = account_of_dropped(half_stale(prompt_tokens=5))
    assert dropped == Account([0, 0, 0, 8], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 8])


def test_truncated_response_keeps_its_gradient_where_it_is_masked() -> None:
    group = make_group(tokens=2)
    cut = dataclasses.replace(group.trajectories[0], finish_reason="length")
    group = dataclasses.replace(group, trajectories=(cut, group.trajectories[1]))
    masked, account = judge([group], 0, Rule("wait", max_lag=4), mask_truncated=True)
    assert masked.tolist() == [0, 0, 1, 1]
    assert account == Account([0, 0, 4], [0, 0, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0])
    assert judge([group], 0, Rule("wait", max_lag=4), mask_truncated=False)[0].tolist() == [1] * 4
