"""The live view of a run: a table on a terminal, plain lines, one a second at most, elsewhere.

In: records and notes as they happen. Out: text on the console, and never an exception: a run outlives its display.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from counterflow.records import EvaluationRecord, StepRecord

__all__ = ["Display"]

ROWS = 10
SECONDS_BETWEEN_LINES = 1.0
STEPS_IN_ESTIMATE = 20


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    rank: int
    """Columns of the highest rank are left out first where the terminal is narrow."""
    cell: Callable[[StepRecord, EvaluationRecord | None], str]


COLUMNS = (
    _Column("step", 6, 0, lambda step, _: str(step.step)),
    _Column("version", 7, 4, lambda step, _: str(step.policy_version)),
    _Column("reward", 6, 0, lambda step, _: number(step.reward_mean, 3)),
    _Column("held-out", 8, 1, lambda _, evaluation: number(100 * evaluation.rate, 1) + " %" if evaluation else "-"),
    _Column("lag mean/max", 12, 1, lambda step, _: f"{number(step.lag_mean, 1)} / {step.lag_max}"),
    _Column("KL to ref", 9, 2, lambda step, _: number(step.kl_reference, 4)),
    _Column("ESS", 5, 2, lambda step, _: number(step.ess_token, 3)),
    _Column("actors tok/s", 12, 3, lambda step, _: number(step.actors_tokens_per_s, 0)),
    _Column("learner tok/s", 13, 3, lambda step, _: number(step.learner_tokens_per_s, 0)),
    _Column("buffer", 6, 3, lambda step, _: str(step.buffer_groups)),
    _Column("waiting", 7, 4, lambda step, _: waiting_share(step)),
)


class Display:
    """Shows a run while it runs; use it as a context manager.

    Args:
        total_steps: optimizer steps the run will take.
        console: where to write; None is the standard output.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._total = total_steps
        self._console = console or Console()
        self._live: Live | None = None
        self._recent: deque[tuple[StepRecord, EvaluationRecord | None]] = deque(maxlen=STEPS_IN_ESTIMATE)
        self._evaluation: EvaluationRecord | None = None
        self._line_at_s = -math.inf
        self._pending: StepRecord | None = None
        self._on_terminal = self._console.is_terminal and not self._console.is_dumb_terminal

    def __enter__(self) -> Display:
        if self._on_terminal:
            with contextlib.suppress(OSError, ValueError):
                self._live = Live(self._view(), console=self._console, auto_refresh=False)
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending is not None:
            self._write(self._line(self._pending))
            self._pending = None
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Say something above the table."""
        if self._live is None:
            self._write(text)
            return
        with contextlib.suppress(OSError, ValueError):
            self._console.print(Text(text))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Take over an evaluation that belongs to no step, such as the one before the first."""
        self._evaluation = record

    def step(self, record: StepRecord, *, evaluation: EvaluationRecord | None = None) -> None:
        """Show one optimizer step, and the newest evaluation if there is a new one."""
        self._evaluation = evaluation or self._evaluation
        first = not self._recent
        self._recent.append((record, self._evaluation))
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.update(self._view(), refresh=True)
            return
        due = record.time_s - self._line_at_s >= SECONDS_BETWEEN_LINES
        if first or due or record.step >= self._total:
            self._write(self._line(record))
            self._line_at_s, self._pending = record.time_s, None
        else:
            self._pending = record

    def _line(self, step: StepRecord) -> str:
        parts = [
            f"step {step.step}/{self._total}",
            f"version {step.policy_version}",
            f"reward {number(step.reward_mean, 2)}",
            f"heldout {_heldout(self._evaluation)}",
            f"lag {number(step.lag_mean, 1)}/{step.lag_max}",
            f"kl_ref {number(step.kl_reference, 3)}",
            f"ess {number(step.ess_token, 2)}",
            f"tok/s {number(step.actors_tokens_per_s, 0)}/{number(step.learner_tokens_per_s, 0)}",
            f"buffer {step.buffer_groups}",
            f"eta {clock(self._seconds_left())}",
        ]
        return " ".join(parts)

    def _write(self, text: str) -> None:
        stream = self._console.file
        try:
            stream.write(text + "\n")
            stream.flush()
        except UnicodeEncodeError:
            self._write(text.encode("ascii", "backslashreplace").decode("ascii"))
        except (OSError, ValueError):
            # The reader of a pipe has gone, or the stream is closed: the run goes on unseen.
            return

    def _view(self) -> RenderableType:
        if not self._recent:
            return Text(f"step 0 of {self._total}", style="dim")
        return Group(self._table(), self._progress())

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        shown = _columns_within(self._console.width)
        for column in shown:
            table.add_column(
                column.title, justify="right", no_wrap=True, min_width=min(column.width, self._console.width)
            )
        rows = list(self._recent)[-ROWS:]
        for step, evaluation in rows:
            newest = step is rows[-1][0]
            table.add_row(*(Text(column.cell(step, evaluation)) for column in shown), style="" if newest else "dim")
        return table

    def _progress(self) -> Table:
        done = self._recent[-1][0].step
        bar = ProgressBar(
            total=max(1, self._total), completed=min(done, self._total), width=max(4, min(40, self._console.width // 3))
        )
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(
            bar, Text(f"step {done} of {self._total}"), Text(f"{clock(self._seconds_left())} left", style="dim")
        )
        return line

    def _seconds_left(self) -> float:
        steps = [step for step, _ in self._recent]
        if not steps:
            return math.nan
        left = max(0, self._total - steps[-1].step)
        if len(steps) < 2:
            return 0.0 if left == 0 else math.nan
        return left * (steps[-1].time_s - steps[0].time_s) / (len(steps) - 1)


def number(value: float, digits: int) -> str:
    """A number for a table cell; what is not finite says so."""
    return f"{value:.{digits}f}" if math.isfinite(value) else str(float(value))


def _heldout(evaluation: EvaluationRecord | None) -> str:
    """Its accuracy and version, which may be long ago."""
    return f"{number(evaluation.rate, 2)}@{evaluation.policy_version}" if evaluation else "-"


def clock(seconds: float) -> str:
    """`mm:ss`, or `h:mm:ss` from an hour on."""
    if not math.isfinite(seconds) or seconds < 0:
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def waiting_share(step: StepRecord) -> str:
    """Share of the learner's time that it waited for groups."""
    whole = step.wait_s + step.train_s
    return f"{100 * step.wait_s / whole:.0f} %" if math.isfinite(whole) and whole > 0 else "-"


def _columns_within(width: int) -> list[_Column]:
    shown = list(COLUMNS)
    while len(shown) > 2 and sum(column.width + 2 for column in shown) - 2 > width:
        shown.remove(max(shown, key=lambda column: column.rank))
    return shown
