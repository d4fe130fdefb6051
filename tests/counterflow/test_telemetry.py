"""What may go wrong with what a run tells of itself: numbers that count what they should not."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from step_records import make_step

from counterflow.configs.schema import RunConfig
from counterflow.display import Display
from counterflow.metrics import Metrics
from counterflow.recorder import Recorder
from counterflow.telemetry import Telemetry


def test_start_of_the_engines_counts_as_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path)
    recorder.add_step(make_step(1, time_s=10.0, tokens_generated=100))
    recorder.flush()
    config = RunConfig()
    with closing(Metrics(config.metrics, max_lag=4)) as metrics:
        telemetry = Telemetry(config, tmp_path, metrics, Display(9, Console(file=io.StringIO())))
        monkeypatch.setattr(telemetry, "now", lambda: 70.0)
        telemetry.generating()
        telemetry.step(make_step(2, time_s=74.0, tokens_generated=300), served=2, skipped=0)
        telemetry.step(make_step(3, time_s=75.0, tokens_generated=390), served=3, skipped=0)
    rates = [record.actors_tokens_per_s for record in telemetry._recorder.records.steps]
    assert rates[1:] == [200 / 4, 90 / 1]
