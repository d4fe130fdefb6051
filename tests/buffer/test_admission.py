"""Admission keeps the lag bound and never locks a run up."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from counterflow.buffer.admission import open_groups


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 64), st.integers(0, 5000))
def test_group_starts_before_its_budget(version: int, max_lag: int, groups_per_step: int, n: int) -> None:
    opened = n < open_groups(version, max_lag, groups_per_step)
    assert opened == (n // groups_per_step <= version + max_lag)


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 64), st.integers(1, 5), st.integers(0, 5000))
def test_last_use_of_a_group_comes_too_late(
    version: int, max_lag: int, groups_per_step: int, uses: int, n: int
) -> None:
    opened = n < open_groups(version, max_lag, groups_per_step, uses=uses)
    last_use = n // groups_per_step * uses + uses - 1
    assert opened == (last_use <= version + max_lag)


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 64))
def test_step_can_never_be_filled(version: int, max_lag: int, groups_per_step: int) -> None:
    assert open_groups(version, max_lag, groups_per_step) >= (version + 1) * groups_per_step


def test_unbounded_lag_is_bounded() -> None:
    assert open_groups(0, math.inf, 8) >= 2**50


def test_groups_start_that_no_step_will_train() -> None:
    assert open_groups(9, 4, 8, total_groups=80) == 80
    assert open_groups(0, math.inf, 8, total_groups=80) == 80
