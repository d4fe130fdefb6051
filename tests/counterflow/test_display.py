"""What may go wrong with the live view: it breaks a run, floods a log, or loses the last step."""

from __future__ import annotations

import dataclasses
import errno
import io
import math

import pytest
from rich.console import Console
from step_records import make_step

from counterflow.display import Display, clock
from counterflow.records import EvaluationRecord, StepRecord

EVALUATION = EvaluationRecord(0, 0, 0.0, 40, 100, 0.3, 0.5, 0.1)


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_plain_line_holds_what_a_log_needs() -> None:
    console = plain()
    with Display(120, console) as display:
        display.note("loading [the] model")
        display.step(make_step(11), evaluation=EVALUATION)
        display.step(
            make_step(
                12, reward_mean=0.41, lag_mean=2.1, lag_max=4, kl_reference=0.003, ess_token=0.97, buffer_groups=44,
                actors_tokens_per_s=5100.2, learner_tokens_per_s=2900.4,
            )
        )  # fmt: skip
    assert written(console)[0] == "loading [the] model"
    assert written(console)[2] == (
        "step 12/120 version 12 reward 0.41 heldout 0.40@0 lag 2.1/4 kl_ref 0.003 ess 0.97 "
        "tok/s 5100/2900 buffer 44 eta 03:36"
    )


def test_fast_steps_do_not_flood_a_log_and_the_last_is_shown() -> None:
    console = plain()
    with Display(100, console) as display:
        for step in range(1, 101):
            display.step(make_step(step, time_s=step * 0.1))
    lines = written(console)
    assert 10 <= len(lines) <= 12
    assert lines[0].startswith("step 1/100 ")
    assert lines[-1].startswith("step 100/100 ")


def test_an_interrupted_run_still_shows_its_last_step() -> None:
    console = plain()
    with pytest.raises(KeyboardInterrupt), Display(100, console) as display:
        display.step(make_step(1, time_s=1.0))
        display.step(make_step(2, time_s=1.1))
        raise KeyboardInterrupt
    assert [line.split()[1] for line in written(console)] == ["1/100", "2/100"]


def test_no_escape_codes_off_a_terminal() -> None:
    console = plain()
    with Display(3, console) as display:
        display.note("héllo")
        display.step(make_step(1), evaluation=EVALUATION)
    assert "\x1b" not in "\n".join(written(console))


@pytest.mark.parametrize("width", [1, 5, 20, 40, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_any_width_and_values_that_are_no_numbers(width: int, terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, height=10)
    values = {field.name: math.nan for field in dataclasses.fields(StepRecord) if field.type == "float"}
    with Display(30, console) as display:
        display.note("starting")
        display.step(make_step(1, **values))
        for step in range(2, 30):
            display.step(make_step(step, kl_reference=math.inf, wait_s=1.0))
    assert written(console)


def test_a_wide_terminal_shows_every_column_and_the_progress() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, height=30)
    with Display(30, console) as display:
        display.step(make_step(1), evaluation=EVALUATION)
        display.step(make_step(2, wait_s=1.0, train_s=3.0))
    text = "\n".join(written(console))
    for shown in ("held-out", "KL to ref", "actors tok/s", "waiting", "25 %", "40.0 %", "step 2 of 30", "00:56 left"):
        assert shown in text


class Gone(io.StringIO):
    """A pipe or terminal that has gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(("terminal", "error"), [(True, OSError(errno.EIO, "gone")), (False, BrokenPipeError())])
def test_a_reader_that_went_away_does_not_end_the_run(terminal: bool, error: OSError) -> None:
    with Display(3, Console(file=Gone(error), force_terminal=terminal, width=80)) as display:
        display.note("starting")
        display.step(make_step(1))
        display.step(make_step(2))


def test_a_stream_that_cannot_say_it_says_it_in_ascii() -> None:
    raw = io.BytesIO()
    with Display(3, Console(file=io.TextIOWrapper(raw, encoding="ascii"), force_terminal=False)) as display:
        display.note("π")
        assert raw.getvalue() == b"\\u03c0\n"


def test_clock() -> None:
    assert [clock(x) for x in (0, 72, 3661, math.nan, -1)] == ["00:00", "01:12", "1:01:01", "--:--", "--:--"]
