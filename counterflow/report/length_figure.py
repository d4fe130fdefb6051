"""The picture of prompt lengths: which were offered to the learner, and which it trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

from counterflow.lengths import added, longest
from counterflow.records import StepRecord
from counterflow.report import figures

__all__ = ["lengths_figure", "summed"]


def summed(
    steps: Sequence[StepRecord], name: Literal["offered_tokens", "trained_tokens", "stale_tokens"]
) -> list[float]:
    """A count by prompt length over all steps."""
    counts: list[list[float]] = [getattr(step, name) for step in steps]
    return reduce(added, counts, [])


def lengths_figure(offered: Sequence[float], trained: Sequence[float]) -> str:
    """Share of response tokens by prompt length, offered and trained side by side."""
    figure, axes = figures.blank("response tokens, %", "prompt, tokens")
    shown = range(next(i for i, count in enumerate(offered) if count), len(offered))
    for counts, colour, label, side in ((offered, figures.GRID, "offered", -1), (trained, figures.BLUE, "trained", 1)):
        whole = sum(counts) or 1
        heights = [100 * counts[i] / whole for i in shown]
        axes.bar([i + 0.2 * side for i in shown], heights, width=0.38, color=colour, label=label)
    axes.set_xticks(list(shown), [f"≤ {longest(i)}" for i in shown])
    figures.legend(axes)
    return figures.svg(figure)
