"""The audit command: JSON of the promised shape, a table, a picture, and bad input as one clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
        (json.dumps(CHAIN | {"pi": [[0.0, 1.0]]}), "toy.json: pi has shape"),
        (json.dumps(CHAIN | {"vocab": "two"}), "two"),
        (json.dumps(CHAIN | {"vocab": None}), "whole numbers"),
        (json.dumps(CHAIN | {"length": float("inf")}), "whole numbers"),
        (json.dumps(CHAIN | {"mu": None}), "not a list of rows of numbers"),
        (json.dumps(CHAIN | {"ref": [[0.0, float("nan")]] * 3}), "ref holds a logit that is not finite"),
        (json.dumps(CHAIN | {"vocab": 2.0}), "whole numbers"),
        (json.dumps(CHAIN | {"vocab": True}), "whole numbers"),
        (json.dumps(CHAIN | {"mu": [[True, 0.0]] * 3}), "mu is not a list of rows of numbers"),
        (json.dumps(CHAIN | {"mu": [[10**400, 0]] * 3}), "mu is no table of logits"),
        (json.dumps(CHAIN | {"mu": [[0.0, 1.0], [0.0], [0.0, 1.0]]}), "mu is no table of logits"),
        (json.dumps(CHAIN | {"mu": [[1e4, 0.0]] * 3}), r"mu lie 1e\+04 apart.*with length 2 they may lie 105.8 apart"),
        (json.dumps(CHAIN | {"mu": [[1e308, -1e308]] * 3}), "mu lie inf apart"),
        (json.dumps(CHAIN).replace("1.4", "1e400"), "pi holds a logit that is not finite"),
        (json.dumps(CHAIN | {"nu": 1}), "ref, nu: give"),
        ('{"vocab": 2}', "its keys are vocab: give"),
        ('{"vocab": 3, ' + json.dumps(CHAIN)[1:], "stands there twice"),
        ("[" * 100_000, "cannot be read as JSON"),
    ):
        path = tmp_path / "toy.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=complaint):
            invoke("--tables", path)
    with pytest.raises(ConfigError, match="no such file"):
        invoke("--tables", tmp_path / "missing.json")
    for drift, complaint in (("inf", "drift is inf"), ("nan", "drift is nan"), ("1e308", "mu lie inf apart")):
        with pytest.raises(ConfigError, match=complaint):
            invoke("--drift", drift, "--json")
    for cap in (0, "nan"):
        with pytest.raises(ConfigError, match=f"--cap is {cap}"):
            invoke("--cap", cap)
    for option in (("--seed", -1), ("--vocab", 1), ("--length", 0)):
        assert invoke(*option).exit_code == 2
    with pytest.raises(ConfigError, match="not both"):
        invoke("run.yaml", "--tables", "toy.json")


@pytest.mark.parametrize(
    ("vocab", "length"), [(50, 9), (256, 2), (65_536, 1), (40, 3), (2, 16), (10**6, 10**7), (2, 10**30), (10**400, 1)]
)
def test_an_audit_that_would_take_long_or_much_memory_is_refused_at_once(vocab, length, tmp_path):
    with pytest.raises(ConfigError, match=r"too many.*may be 400,000, as vocab 3 and length 8, or 19 and 3"):
        invoke("--vocab", vocab, "--length", length)
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(CHAIN | {"vocab": vocab, "length": length}))
    with pytest.raises(ConfigError, match="too many"):
        invoke("--tables", path)


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text("\ufeff" + json.dumps(CHAIN), encoding="utf-8")
    assert invoke("--tables", path).exit_code == 0


def test_a_picture_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "taken.png").mkdir()
    for name, complaint in (
        ("", "its suffix says the format"),
        ("audit", "its suffix says the format"),
        ("audit.xyz", "its suffix says the format"),
        ("missing/audit.png", "there is no folder"),
        ("taken.png", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            invoke("--vocab", 2, "--length", 1, "--picture", tmp_path / name if name else "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken.png"]


def test_a_picture_is_named_or_its_absence_explained(tmp_path):
    config, picture = tmp_path / "a$x$b.yaml", tmp_path / "a$x^$b.svg"
    config.write_text("objective:\n  kl: {beta: 0.0}\n")
    assert "picture: none, because beta is 0" in invoke(config, "--picture", picture).stdout
    result = invoke(config, "--picture", picture, "--json")
    assert json.loads(result.stdout) and "because beta is 0" in result.stderr
    assert f"picture: {picture}\n" in invoke("--vocab", 2, "--length", 1, "--picture", picture).stdout
    assert picture.is_file()


def in_a_process(stdout, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "counterflow.cli", "audit", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def test_output_that_cannot_be_written_is_one_clear_error():
    with Path("/dev/full").open("w") as full:
        done = in_a_process(full, "--vocab", "2", "--length", "1")
    assert done.returncode == 1
    assert done.stderr == (
        "counterflow: error: the output cannot be written (No space left on device): "
        "make room there, or send it elsewhere\n"
    )


def test_a_terminal_of_ascii_gets_a_table_of_ascii(tmp_path):
    tables = tmp_path / "\u00fc.json"
    tables.write_text(json.dumps(CHAIN))
    done = in_a_process(subprocess.PIPE, "--tables", str(tables), PYTHONIOENCODING="ascii", COLUMNS="300")
    assert done.returncode == 0, done.stderr
    assert "| off_1 " in done.stdout and "\\xfc.json" in done.stdout


def test_options_of_the_toy_are_refused_where_they_would_have_no_effect(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("")
    for option in ("--vocab", "--length", "--seed", "--drift", "--cap"):
        with pytest.raises(ConfigError, match=f"{option} would have no effect: a CONFIG"):
            invoke(config, option, 2)
    tables = tmp_path / "toy.json"
    tables.write_text(json.dumps(CHAIN))
    for option in ("--vocab", "--length", "--seed", "--drift"):
        with pytest.raises(ConfigError, match=f"{option} would have no effect: --tables"):
            invoke("--tables", tables, option, 2)


def test_what_was_assumed_is_printed(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("objective:\n  advantage: group_mean\n")
    printed = invoke(config).stdout
    assert "length 3, advantage group_mean, rewards 0, groups of 2" in printed.replace("\n", " ")
    assert "this_run: the run's own loss over all groups of two; other rows: one response, no baseline" in printed
