"""The pictures of a report: pure functions from records to SVG text.

Colours are CSS variables (`var(--ink)`, `var(--blue)`, ...) that the page defines for light and dark.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from counterflow.recorder import lag_counts
from counterflow.records import EvaluationRecord, Interval, StepRecord

__all__ = [
    "entropy_figure",
    "ess_figure",
    "grad_norm_figure",
    "heldout_figure",
    "kl_figure",
    "lag_by_step_figure",
    "lag_histogram_figure",
    "reward_figure",
    "timeline_figure",
]

# matplotlib knows no CSS variables: it draws in colours nobody would choose, and the text of the SVG is rewritten.
INK, QUIET, GRID, BLUE, AMBER, TEAL, PINK, VIOLET = (f"#01fe{n:02x}" for n in range(8))
VARIABLES = {
    INK: "--ink", QUIET: "--quiet", GRID: "--grid", BLUE: "--blue",
    AMBER: "--amber", TEAL: "--teal", PINK: "--pink", VIOLET: "--violet",
}  # fmt: skip
ACTIVITY_COLOURS = {
    "train": BLUE, "stage": PINK, "wait": GRID, "generate": TEAL, "update": AMBER, "evaluate": VIOLET,
}  # fmt: skip
SIZE = (5.4, 2.8)
ZOOM_S = 10.0
PIXELS = 1500


def reward_figure(steps: Sequence[StepRecord]) -> str:
    """Mean task reward by step: raw faint, moving average strong."""
    figure, axes = blank("reward")
    values = _finite(step.reward_mean for step in steps)
    window = max(1, min(25, len(values) // 8))
    marker = "o" if len(values) == 1 else None
    axes.plot(
        _x(steps), values, color=BLUE, alpha=0.35 if window > 1 else 1.0, linewidth=1, marker=marker, markersize=4
    )
    _widen(axes, _x(steps))
    if window > 1:
        axes.plot(_x(steps), moving_average(values, window), color=BLUE, linewidth=2, label=f"mean of {window} steps")
        legend(axes)
    return svg(figure)


def heldout_figure(evaluations: Sequence[EvaluationRecord]) -> str:
    """Held-out accuracy by step with its 95 % Wilson interval."""
    figure, axes = blank("held-out accuracy, %")
    rates = [100 * record.rate for record in evaluations]
    below = [max(0.0, rate - 100 * record.low) for rate, record in zip(rates, evaluations, strict=True)]
    above = [max(0.0, 100 * record.high - rate) for rate, record in zip(rates, evaluations, strict=True)]
    axes.errorbar(
        [record.step for record in evaluations], rates, yerr=[below, above],
        color=TEAL, linewidth=2, elinewidth=1.3, capsize=4, marker="o", markersize=4.5,
    )  # fmt: skip
    axes.margins(x=0.08)
    _widen(axes, [record.step for record in evaluations])
    return svg(figure)


def lag_histogram_figure(steps: Sequence[StepRecord], max_lag: float | None) -> str:
    """Share of trained tokens by lag, and of their weight in the loss, with the bound marked."""
    figure, axes = blank("trained tokens, %", "lag, versions")
    counts = lag_counts(steps)
    total = sum(counts) or 1
    axes.bar(range(len(counts)), [100 * count / total for count in counts], color=BLUE, width=0.8)
    if shares := weighted_lag_shares(steps):
        weighted = [100 * share for share in shares]
        axes.plot(range(len(shares)), weighted, color=AMBER, linestyle="", marker="_", markersize=14,
                  markeredgewidth=2, label="by weight in the loss")  # fmt: skip
    if max_lag is not None and math.isfinite(max_lag):
        axes.axvline(max_lag + 0.5, color=PINK, linewidth=1.5, linestyle="--", label=f"max_lag = {max_lag:g}")
        axes.set_xlim(-0.6, max(len(counts) - 1, max_lag) + 1.0)
    if axes.get_legend_handles_labels()[0]:
        legend(axes)
    return svg(figure)


def lag_by_step_figure(steps: Sequence[StepRecord], max_lag: float | None) -> str:
    """Mean and largest token lag by step, the parts of the mean below it, with the bound marked."""
    figure, axes = blank("lag, versions")
    axes.stackplot(
        _x(steps),
        *([getattr(step, f"lag_{part}_mean") for step in steps] for part in ("in_flight", "in_queue", "in_learner")),
        colors=(TEAL, VIOLET, PINK), alpha=0.35, linewidth=0, labels=("in flight", "in queue", "in learner"),
    )  # fmt: skip
    _line(axes, steps, [step.lag_mean for step in steps], BLUE, "mean")
    _line(axes, steps, [step.lag_max for step in steps], AMBER, "largest")
    if max_lag is not None and math.isfinite(max_lag):
        axes.axhline(max_lag, color=PINK, linewidth=1.5, linestyle="--", label=f"max_lag = {max_lag:g}")
    tallest = max(
        [step.lag_max for step in steps] + ([max_lag] if max_lag is not None and math.isfinite(max_lag) else [])
    )
    axes.set_ylim(-0.03 * max(1, tallest), 1.12 * max(1, tallest))
    legend(axes, columns=2)
    return svg(figure)


def kl_figure(steps: Sequence[StepRecord]) -> str:
    """How far the policy is from the reference, and from the policy that sampled."""
    figure, axes = blank("KL, nats a token")
    _line(axes, steps, [step.kl_reference for step in steps], BLUE, "KL(π ‖ ref), k3")
    _line(axes, steps, [step.kl_behavior_k3 for step in steps], AMBER, "KL(μ ‖ π), k3")
    _line(axes, steps, [step.kl_behavior_k1 for step in steps], TEAL, "KL(μ ‖ π), k1", width=0.9)
    legend(axes)
    return svg(figure)


def ess_figure(steps: Sequence[StepRecord]) -> str:
    """Effective sample size over N by step."""
    figure, axes = blank("effective samples / N")
    _line(axes, steps, [step.ess_token for step in steps], BLUE, "token ratios")
    _line(axes, steps, [step.ess_sequence for step in steps], AMBER, "sequence ratios")
    axes.set_ylim(-0.02, 1.05)
    legend(axes)
    return svg(figure)


def entropy_figure(steps: Sequence[StepRecord]) -> str:
    """Mean token entropy by step."""
    figure, axes = blank("entropy, nats")
    _line(axes, steps, [step.entropy for step in steps], TEAL, "entropy")
    return svg(figure)


def grad_norm_figure(steps: Sequence[StepRecord]) -> str:
    """Gradient norm by step."""
    figure, axes = blank("gradient norm")
    _line(axes, steps, [step.grad_norm for step in steps], AMBER, "gradient norm")
    return svg(figure)


def timeline_figure(intervals: Sequence[Interval]) -> str:
    """Who did what when: the whole run, and ten seconds of its middle where overlap can be seen."""
    owners = sorted({interval.owner for interval in intervals}, key=_owner_order)
    start = min((interval.start_s for interval in intervals), default=0.0)
    end = max((interval.end_s for interval in intervals), default=1.0)
    training = [interval for interval in intervals if interval.activity == "train"]
    middle = (training[0].start_s + training[-1].end_s) / 2 if training else (start + end) / 2
    window = (max(start, middle - ZOOM_S / 2), min(end, middle + ZOOM_S / 2))
    spans = [(start, end), window] if end - start > 1.5 * ZOOM_S else [(start, end)]
    height = 0.55 + 0.34 * max(1, len(owners))
    figure = Figure(figsize=(10.8, len(spans) * height + 0.45), layout="constrained")
    rows = figure.subplots(len(spans), 1, squeeze=False)[:, 0]
    for axes, span in zip(rows, spans, strict=True):
        _dress(axes, "", "seconds since the start" if span is spans[-1] else "")
        axes.grid(False)
        axes.spines["left"].set_visible(False)
        for row, owner in enumerate(owners):
            _draw_owner(axes, row, [interval for interval in intervals if interval.owner == owner], span)
        axes.set_yticks(range(len(owners)), owners, parse_math=False, color=INK)
        axes.set_ylim(len(owners) - 0.45, -0.55)
        axes.set_xlim(*span) if span[1] > span[0] else None
    if len(spans) == 2:
        rows[0].axvspan(*window, facecolor="none", edgecolor=INK, linewidth=1.2)
        rows[0].set_title("whole run; the frame is magnified below", loc="left", fontsize=8.5, color=QUIET)
    shown = [name for name in ACTIVITY_COLOURS if any(interval.activity == name for interval in intervals)]
    handles = [rows[0].barh([0], [0], color=ACTIVITY_COLOURS[name], label=name) for name in shown]
    if handles:
        figure.legend(
            handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK
        )
    return svg(figure)


def weighted_lag_shares(steps: Sequence[StepRecord]) -> list[float]:
    """Share of the loss's weight by lag, mean over the steps that have any."""
    found = [record.lag_histogram_weighted for record in steps if record.lag_histogram_weighted]
    return [math.fsum(shares) / len(found) for shares in itertools.zip_longest(*found, fillvalue=0.0)]


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values that are numbers, at each place."""
    means = []
    for place in range(len(values)):
        recent = [value for value in values[max(0, place - window + 1) : place + 1] if math.isfinite(value)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def coalesce(stretches: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Join stretches closer than `gap`: what a picture of this size cannot show apart."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _draw_owner(axes: Any, row: int, intervals: Sequence[Interval], span: tuple[float, float]) -> None:
    pixel = (span[1] - span[0]) / PIXELS
    for activity in ("wait", "generate", "train", "stage", "update", "evaluate"):
        inside = (
            (max(interval.start_s, span[0]), min(interval.end_s, span[1]))
            for interval in intervals
            if interval.activity == activity and interval.end_s > span[0] and interval.start_s < span[1]
        )
        bars = [(start, max(end - start, pixel)) for start, end in coalesce(inside, pixel)]
        axes.broken_barh(bars, (row - 0.36, 0.72), facecolor=ACTIVITY_COLOURS[activity], linewidth=0)


def _owner_order(owner: str) -> tuple[bool, str, int, str]:
    name, _, tail = owner.rpartition(" ")
    return owner != "learner", name, int(tail) if tail.isdigit() else 0, owner


def blank(ylabel: str, xlabel: str = "step") -> tuple[Any, Any]:
    """A figure of the report's size, and its axes."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    _dress(axes, ylabel, xlabel)
    return figure, axes


def _dress(axes: Any, ylabel: str, xlabel: str) -> None:
    axes.set_ylabel(ylabel, color=QUIET, fontsize=9.5)
    axes.set_xlabel(xlabel, color=QUIET, fontsize=9.5)
    axes.tick_params(colors=QUIET, labelsize=9, length=0)
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    round_steps = [1, 2, 2.5, 5, 10]
    whole = xlabel != "seconds since the start"
    axes.xaxis.set_major_locator(MaxNLocator(integer=whole, nbins=8, steps=round_steps, min_n_ticks=1 if whole else 2))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=round_steps))


def _x(steps: Sequence[StepRecord]) -> list[int]:
    return [step.step for step in steps]


def _finite(values: Iterable[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _line(
    axes: Any, steps: Sequence[StepRecord], values: Sequence[float], colour: str, label: str, width: float = 1.6
) -> None:
    marker = "o" if len(values) == 1 else None
    axes.plot(_x(steps), _finite(values), color=colour, linewidth=width, label=label, marker=marker, markersize=4)
    _widen(axes, _x(steps))


def legend(axes: Any, columns: int = 1) -> None:
    """Name the curves of a figure."""
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best", handlelength=1.4, ncols=columns)


def _widen(axes: Any, places: Sequence[int]) -> None:
    """A single step would otherwise stand on an axis of thousandths of a step."""
    if len(set(places)) == 1:
        axes.set_xlim(places[0] - 1, places[0] + 1)


def svg(figure: Any) -> str:
    """The figure as text, in the page's own colours."""
    figure.patch.set_alpha(0.0)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
