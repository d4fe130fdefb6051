"""Step records for tests that read a few of their numbers."""

from __future__ import annotations

from typing import Any, get_origin, get_type_hints

from counterflow.records import StepRecord


def make_step(step: int = 0, **changes: Any) -> StepRecord:
    """A record of zeros and empty lists, but for its number, its version, two seconds a step, and `changes`."""
    hints = get_type_hints(StepRecord)
    zero = {name: [] if get_origin(hint) is list else 0 for name, hint in hints.items()}
    return StepRecord(**{**zero, "step": step, "policy_version": step, "time_s": 2.0 * step, **changes})
