"""Which pictures a report shows, with their captions and the words that say the same to people who cannot see them.

In: a run's records and summary. Out: pictures in the order of the page; fewer where a run recorded less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from counterflow.lengths import distance
from counterflow.recorder import RunRecords
from counterflow.records import StepRecord
from counterflow.report import figures, length_figure
from counterflow.report.words import percent, short

__all__ = ["Picture", "pictures_of"]


@dataclass(frozen=True)
class Picture:
    """A figure of the page; `svg` is trusted text."""

    title: str
    caption: str
    alt: str
    svg: Markup
    wide: bool = False


def pictures_of(records: RunRecords, summary: dict[str, Any]) -> list[Picture]:
    """Every picture that these records can fill."""
    pictures = []
    if records.evaluations:
        pictures.append(_heldout(records))
    if records.steps:
        pictures += _of_steps(records.steps, summary)
    if records.intervals:
        pictures.append(_timeline(records, summary))
    return pictures


def _heldout(records: RunRecords) -> Picture:
    said = "; ".join(f"step {record.step}: {percent(record.rate)}" for record in records.evaluations)
    return Picture(
        "Held-out accuracy",
        "Greedy decoding of the held-out set; bars are 95 % Wilson intervals.",
        f"Line chart of held-out accuracy with 95 % intervals. {said}.",
        Markup(figures.heldout_figure(records.evaluations)),
    )


def _of_steps(steps: list[StepRecord], summary: dict[str, Any]) -> list[Picture]:
    lag = summary["lag"]
    max_lag = math.inf if summary["max_lag"] == "inf" else summary["max_lag"]
    bound = "no bound" if max_lag in (None, math.inf) else f"bound {max_lag:g}"
    first, last = steps[0], steps[-1]

    def change(name: str) -> str:
        before, after = getattr(first, name), getattr(last, name)
        return f"from {before:.3g} at step {first.step} to {after:.3g} at step {last.step}"

    return [
        Picture(
            "Reward",
            "Mean task reward of the groups that each step trained on.",
            f"Line chart of mean reward, {change('reward_mean')}.",
            Markup(figures.reward_figure(steps)),
        ),
        Picture(
            "Lag of trained tokens",
            "Learner version at the update, minus the version that sampled the token: by tokens, and by their weight "
            "in the loss.",
            f"Histogram of token lag: mean {short(lag['mean'])}, 95th percentile {short(lag['p95'])}, "
            f"largest {short(lag['max'])}, {bound}.",
            Markup(figures.lag_histogram_figure(steps, max_lag)),
        ),
        Picture(
            "Lag by step",
            "Mean and largest token lag of each step. The mean is made while groups are generated (in flight), wait in "
            "the buffer (in queue) and are used again (in learner).",
            f"Line chart of token lag by step: mean {change('lag_mean')}, in flight {change('lag_in_flight_mean')}, "
            f"in queue {change('lag_in_queue_mean')}, {bound}.",
            Markup(figures.lag_by_step_figure(steps, max_lag)),
        ),
        *_lengths(steps),
        Picture(
            "KL divergence",
            "π is the policy, ref the frozen reference, μ the policy that sampled.",
            f"Line chart of KL in nats a token: to the reference {change('kl_reference')}; "
            f"from the behaviour policy {change('kl_behavior_k3')}.",
            Markup(figures.kl_figure(steps)),
        ),
        Picture(
            "Effective sample size",
            "How many of N samples the importance ratios leave; 1 is on-policy.",
            f"Line chart of effective sample size over N: token ratios {change('ess_token')}, "
            f"sequence ratios {change('ess_sequence')}.",
            Markup(figures.ess_figure(steps)),
        ),
        Picture(
            "Entropy",
            "Mean token entropy of the policy; a fall to zero is a collapse.",
            f"Line chart of token entropy in nats, {change('entropy')}.",
            Markup(figures.entropy_figure(steps)),
        ),
        Picture(
            "Gradient norm",
            "Before clipping.",
            f"Line chart of the gradient norm, {change('grad_norm')}.",
            Markup(figures.grad_norm_figure(steps)),
        ),
    ]


def _lengths(steps: list[StepRecord]) -> list[Picture]:
    """Shown where the staleness policy did something, or responses were masked."""
    offered, trained, stale = (
        length_figure.summed(steps, name) for name in ("offered_tokens", "trained_tokens", "stale_tokens")
    )
    if sum(trained) == sum(offered):
        return []
    apart = f"Kolmogorov-Smirnov distance {distance(offered, trained):.2f}"
    touched = f"{percent(sum(stale) / sum(offered))} of response tokens were past admission.max_lag"
    return [
        Picture(
            "Lengths of prompts",
            "Response tokens by length of their prompt: those that came to be trained, or were dropped as stale, and "
            f"what the policies for stale and truncated samples left of them. {apart}; {touched}.",
            f"Bar chart of response tokens by prompt length, offered and trained. {apart}; {touched}.",
            Markup(length_figure.lengths_figure(offered, trained)),
        )
    ]


def _timeline(records: RunRecords, summary: dict[str, Any]) -> Picture:
    busy = summary["busy"]
    return Picture(
        "Who was busy when",
        "One row a process. Where blue and green stand above each other, training and generation overlap.",
        f"Timeline with one row a process. Learner busy {percent(busy['learner'], 0)} of the time, "
        f"actors {percent(busy['actors'], 0)}; training and generating at once {percent(summary['overlap'], 0)}.",
        Markup(figures.timeline_figure(records.intervals)),
        wide=True,
    )
