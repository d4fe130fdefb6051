"""The audit command: JSON of the promised shape, a table, a picture, and bad input as one clear error."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from counterflow.cli_audit import audit
from counterflow.errors import ConfigError

app = typer.Typer()
app.command()(audit)
CHAIN = {"vocab": 2, "length": 2, "pi": [[0.0, 0.4], [0.0, -0.8], [0.0, 1.4]]}
CHAIN |= {"mu": [[0.0, -0.2], [0.0, -0.4], [0.0, 0.8]], "ref": [[0.0, 0.0], [0.0, 0.0], [0.0, 0.4]]}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_tables_give_targets_and_rows_as_json(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(CHAIN))
    found = json.loads(invoke("--tables", path, "--cap", 1.2, "--json").stdout)
    assert list(found) == ["targets", "rows"]
    assert len(found["targets"]["G"]) == 6
    exact = {row["row"] for row in found["rows"] if row["bias_abs"] < 1e-12}
    assert {"off_1", "off_2", "off_16", "off_17", "off_18_k1", "off_18_k3", "on_k1_reward"} <= exact
    assert not exact & {"off_3", "off_4", "off_5", "off_6", "off_8", "off_9", "on_k3_reward"}


def test_toy_is_audited_near_and_far_with_its_own_settings():
    arguments = ("--vocab", 2, "--length", 2, "--drift", 0.5, "--cap", 1.5, "--json")
    found = json.loads(invoke(*arguments, "--seed", 1).stdout)
    assert list(found) == ["near", "far"]
    assert json.loads(invoke(*arguments, "--seed", 2).stdout) != found


def test_configuration_gives_a_verdict_a_table_and_a_picture(tmp_path):
    config, picture = tmp_path / "run.yaml", tmp_path / "audit.png"
    config.write_text("objective:\n  kl: {beta: 0.1, placement: loss, estimator: k1}\n")
    result = invoke(config, "admission.max_lag=8", "--picture", picture)
    assert "verdict: Biased" in result.stdout
    assert "off_9" in result.stdout
    assert "this_run" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(invoke(config, "--json").stdout)
    assert found["row"] == "off_9"
    assert found["near"]["rows"][-1]["row"] == "this_run"


def test_numbers_without_end_are_words_in_json(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("objective:\n  kl: {beta: 0.1}\n")
    found = json.loads(invoke(config, "objective.importance.cap=inf", "admission.max_lag=inf", "--json").stdout)
    assert (found["assumptions"]["cap"], found["assumptions"]["max_lag"]) == ("inf", "inf")
    own = json.loads(invoke(config, "objective.kl.cap=inf", "objective.importance.cap=3", "--json").stdout)
    assert own["assumptions"]["cap"] == 3.0


def test_bad_input_is_one_clear_error(tmp_path):
    for content, complaint in (
        ("[1]", "must hold an object"),
        ("{", "cannot be read as JSON"),
        (json.dumps(CHAIN | {"pi": [[0.0, 1.0]]}), "has shape"),
        (json.dumps(CHAIN | {"vocab": "two"}), "two"),
        (json.dumps(CHAIN | {"vocab": None}), "whole numbers"),
        (json.dumps(CHAIN | {"length": float("inf")}), "whole numbers"),
        (json.dumps(CHAIN | {"mu": None}), "not a list of rows of numbers"),
        (json.dumps(CHAIN | {"ref": [[0.0, float("nan")]] * 3}), "not finite"),
    ):
        path = tmp_path / "toy.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=complaint):
            invoke("--tables", path)
    with pytest.raises(ConfigError, match="no such file"):
        invoke("--tables", tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="too many"):
        invoke("--vocab", 50, "--length", 9)
    with pytest.raises(ConfigError, match="drift is inf"):
        invoke("--drift", "inf", "--json")
    with pytest.raises(ConfigError, match="not both"):
        invoke("run.yaml", "--tables", "toy.json")
