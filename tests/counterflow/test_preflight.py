"""A run folder is overwritten only when the run that made it is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.preflight import holding, make_run_folder


def test_folder_of_a_living_run_is_overwritten(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"folder": tmp_path, "name": "run", "overwrite": True}})
    folder = make_run_folder(config)
    (folder / "summary.json").write_text("{}")
    with holding(folder):
        with pytest.raises(ConfigError, match=r"belongs to a run that is still going on: choose another run\.name"):
            make_run_folder(config)
        assert (folder / "summary.json").exists()
    make_run_folder(config)
    assert not (folder / "summary.json").exists()
