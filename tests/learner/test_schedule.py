"""The learning rate by step, against numbers worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.learner.schedule import learning_rate


def rates(schedule: str, steps: int, **options: float) -> list[float]:
    given = {"peak": 1.0, "warmup_steps": 0, "last_step": 4, **options}
    return [learning_rate(step, schedule=schedule, **given) for step in range(steps)]  # type: ignore[arg-type]


def test_schedule_is_not_what_its_name_says() -> None:
    assert rates("constant", 3) == [1, 1, 1]
    assert rates("constant", 4, warmup_steps=2) == [0.5, 1, 1, 1]
    assert rates("linear", 6) == [0.75, 0.5, 0.25, 0, 0, 0]
    assert rates("linear", 6, warmup_steps=2) == [0.5, 1, 0.5, 0, 0, 0]
    assert rates("linear", 4, floor=0.5) == [0.875, 0.75, 0.625, 0.5]
    assert rates("cosine", 4) == pytest.approx([0.8535533905932737, 0.5, 0.14644660940672627, 0])


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(0, 50),
    st.integers(21, 60),
    st.floats(0, 1),
)
def test_rate_leaves_its_bounds_or_rises_after_the_warm_up(
    schedule: str, warmup: int, step: int, last: int, floor: float
) -> None:
    options = {"peak": 3e-4, "warmup_steps": warmup, "schedule": schedule, "last_step": last, "floor": floor}
    now, then = (learning_rate(at, **options) for at in (step, step + 1))  # type: ignore[arg-type]
    assert 0 <= now <= 3e-4
    assert then >= now if step + 1 < warmup else then <= now or step < warmup
