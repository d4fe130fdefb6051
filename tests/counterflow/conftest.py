"""A run folder, and the command line in this process as a user meets it: an exit code and what was said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from counterflow import cli

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must refuse its input; returns the one line that it said."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["counterflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        out, err = capsys.readouterr()
        assert (exit_info.value.code, out) == (2, ""), err
        assert err.startswith("counterflow: error: ") and err.count("\n") == 1 and err.endswith("\n")
        return err

    return run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: run}\n")
    return folder
