"""Lag of tokens against a schedule written by hand."""

from __future__ import annotations

import pytest

from counterflow.buffer.trajectory import VersionSpan
from counterflow.weight_sync.lag import token_lags


def test_lag_is_not_learner_version_minus_token_version() -> None:
    spans = [VersionSpan(3, 0, 2), VersionSpan(5, 2, 3), VersionSpan(5, 3, 3)]
    assert token_lags(spans, learner_version=7).tolist() == [4, 4, 2]


def test_token_from_the_future_is_trained() -> None:
    with pytest.raises(ValueError, match="sampled by version 8, the learner is at 7"):
        token_lags([VersionSpan(8, 0, 1)], learner_version=7)


def test_empty_response_breaks_lag() -> None:
    assert token_lags([], learner_version=7).tolist() == []
