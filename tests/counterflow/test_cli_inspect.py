"""The inspect command: the right groups by any filter, text that no terminal obeys, one line for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from click.testing import Result
from groups import make_group
from typer.testing import CliRunner

from counterflow.buffer.archive import Archive
from counterflow.buffer.codec import to_batch
from counterflow.buffer.trajectory import Group, Origin, Passage, Trajectory, VersionSpan
from counterflow.cli_inspect import inspect
from counterflow.configs import RunConfig, dump
from counterflow.errors import ConfigError
from counterflow.models import sums_tokenizer

app = typer.Typer()
app.command()(inspect)
Steps = list[list[Group]]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def rows(*arguments: object) -> list[dict[str, Any]]:
    return list(json.loads(invoke(*arguments, "--json").stdout))


def places(*arguments: object) -> list[tuple[int, int]]:
    return [(row["step"], row["position"]) for row in rows(*arguments)]


def archive(run: Path, origin: Origin, steps: Steps) -> Path:
    with closing(Archive(run / "archive", origin, segment_bytes=3000)) as written:
        for version, groups in enumerate(steps):
            written.append(version, [to_batch(group, origin.schema()) for group in groups])
    (run / "config.yaml").touch()
    return run


def rewarded(group: Group, *rewards: float | None) -> Group:
    changed = [replace(t, reward=reward) for t, reward in zip(group.trajectories, rewards, strict=True)]
    return replace(group, trajectories=tuple(changed))


@pytest.fixture
def run(tmp_path: Path, origin: Origin) -> Path:
    """Four steps of two groups: step s is trained at s - 1, its prompts are 2 s - 2 and 2 s - 1, sampled at 0."""
    return archive(tmp_path / "run", origin, [[make_group(2 * step), make_group(2 * step + 1)] for step in range(4)])


def test_numbers_of_a_group_are_those_of_another(tmp_path: Path, origin: Origin) -> None:
    spans = (VersionSpan(1, 0, 0), VersionSpan(2, 0, 2), VersionSpan(4, 2, 3))
    trajectories = [replace(t, version_spans=spans) for t in make_group(0, samples=4).trajectories]
    trajectories[3] = replace(trajectories[3], finish_reason="length")
    group = replace(make_group(0), admission=70, prompt_id=11, trajectories=tuple(trajectories))
    steps: Steps = [[make_group(n)] for n in range(5)] + [[make_group(9), rewarded(group, 0.0, 1.0, None, 0.5)]]
    found = rows(archive(tmp_path, origin, steps), "--step", 6)
    assert len(found) == 2
    assert found[1] == {
        "step": 6,
        "position": 1,
        "admission": 70,
        "prompt_id": 11,
        "samples": 4,
        "tokens": 12,
        "reward_mean": 0.5,
        "reward_std": pytest.approx(np.std([0.0, 1.0, 0.5])),
        "lag_min": 1,
        "lag_max": 3,
        "added_at": None,
        "taken_at": None,
        "finish_reasons": {"stop": 3, "length": 1},
    }


def test_filter_lets_others_pass(run: Path) -> None:
    everything = [(step, position) for step in range(1, 5) for position in range(2)]
    assert places(run) == everything
    assert places(run, "--prompt", 5) == [(3, 1)]
    assert places(run, "--step", 2) == [(2, 0), (2, 1)]
    assert places(run, "--min-lag", 2) == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert places(run, "--min-lag", 2, "--prompt", 7, "--step", 4) == [(4, 1)]
    assert places(run, "--min-lag", 2, "--step", 1) == []
    assert places(run, "--limit", 3) == everything[:3]


def test_reward_filters_take_groups_without_reward(tmp_path: Path, origin: Origin) -> None:
    rewards: list[tuple[float | None, float | None]] = [(0, 0), (0, 1), (1, 1), (None, 1), (None, None)]
    groups = [rewarded(make_group(n), *pair) for n, pair in enumerate(rewards)]
    run = archive(tmp_path, origin, [groups])
    assert places(run, "--min-reward", 0.5) == [(1, 1), (1, 2), (1, 3)]
    assert places(run, "--max-reward", 0.5) == [(1, 0), (1, 1)]
    assert places(run, "--min-reward", 0.1, "--max-reward", 0.9) == [(1, 1)]
    assert rows(run)[4]["reward_mean"] is None
    assert invoke(run).stdout.splitlines()[7].split("│")[7].strip() == "-"


def test_way_through_the_buffer_is_that_of_another_group(tmp_path: Path, origin: Origin) -> None:
    with closing(Archive(tmp_path / "archive", origin)) as written:
        groups = [to_batch(make_group(n), origin.schema()) for n in (5, 3)]
        written.append(7, groups, [Passage(added_at=4, taken_at=6), Passage(added_at=5, taken_at=7)])
    (tmp_path / "config.yaml").touch()
    found = [(row["admission"], row["added_at"], row["taken_at"]) for row in rows(tmp_path)]
    assert found == [(5, 4, 6), (3, 5, 7)]


def test_responses_without_a_token_have_no_lag(tmp_path: Path, origin: Origin) -> None:
    run = archive(tmp_path, origin, [[make_group(0, tokens=0)]])
    (row,) = rows(run)
    assert (row["tokens"], row["lag_min"], row["lag_max"]) == (0, None, None)
    assert places(run, "--min-lag", 0) == []
    assert invoke(run).exit_code == 0


def test_table_hides_that_there_are_more(run: Path) -> None:
    assert "there are more: these are the first 3 (--limit)" in invoke(run, "--limit", 3).stdout
    whole = invoke(run, "--limit", 8).stdout
    assert "there are more" not in whole
    assert "0.500 ± 0.500" in whole and "3..3" in whole and "stop 2" in whole


def test_bad_folder_and_nothing_found_are_not_told_apart(tmp_path: Path, run: Path, origin: Origin) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("none", "empty"):
        with pytest.raises(ConfigError, match=f"{folder} is no run folder"):
            invoke(tmp_path / folder)
    (tmp_path / "empty" / "config.yaml").touch()
    for arguments in (["empty"], ["empty", "--prompt", 1], ["empty", "--text"]):
        answer = invoke(tmp_path / str(arguments[0]), *arguments[1:])
        assert (answer.exit_code, answer.stdout) == (0, f"{tmp_path / 'empty'}: no group is archived yet\n")
    assert invoke(run, "--prompt", 999).stdout == f"{run}: no archived group matches\n"
    assert rows(run, "--prompt", 999) == rows(tmp_path / "empty") == []
    (run / "archive" / "00000000.arrow").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"00000000\.arrow: not a segment"):
        invoke(run)


def said(prompt: str, *responses: str) -> Group:
    tokenizer = sums_tokenizer()

    def ids(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    trajectories = [
        Trajectory(ids(text), np.zeros(len(ids(text)), np.float32), (VersionSpan(0, 0, len(ids(text))),), 1.0, "stop")
        for text in responses
    ]
    return replace(make_group(0), prompt_token_ids=ids(prompt), trajectories=tuple(trajectories))


def configure(run: Path, model: Path) -> None:
    (run / "config.yaml").write_text(dump(RunConfig.model_validate({"model": {"path": model}})))


def test_text_is_not_what_was_said(tmp_path: Path, origin: Origin, tiny_model: Path) -> None:
    run = archive(tmp_path, origin, [[said("12+34=", "46", "47")]])
    configure(run, tiny_model)
    shown = invoke(run, "--text").stdout
    assert "prompt 0: 12+34=\n" in shown
    assert "0: reward 1, stop, 2 tokens: 46\n" in shown
    assert "1: reward 1, stop, 2 tokens: 47\n" in shown
    (row,) = rows(run, "--text")
    assert row["prompt"]["text"] == "12+34="
    assert [response["text"] for response in row["responses"]] == ["46", "47"]


def damaged_configuration(run: Path) -> None:
    (run / "config.yaml").write_text("model: [")


def no_model(run: Path) -> None:
    configure(run, run / "moved")


def empty_model(run: Path) -> None:
    (run / "model").mkdir()
    configure(run, run / "model")


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (damaged_configuration, "config.yaml"),
        (no_model, "moved: there is no such model folder"),
        (empty_model, "its tokenizer cannot be loaded"),
    ],
)
def test_run_without_a_usable_tokenizer_shows_nothing(
    tmp_path: Path, origin: Origin, trouble: Callable[[Path], None], reason: str
) -> None:
    run = archive(tmp_path, origin, [[make_group(0)]])
    trouble(run)
    shown = invoke(run, "--text").stdout
    assert "token ids instead of text: " in shown and reason in shown
    assert "prompt 0: [0, 1, 2, 3]\n" in shown and "1: reward 1, stop, 3 tokens: [1, 2, 3]\n" in shown
    told = invoke(run, "--text", "--json")
    assert reason in told.stderr
    assert json.loads(told.stdout)[0]["prompt"] == {"token_ids": [0, 1, 2, 3], "text": None}


def test_model_that_speaks_to_the_terminal_is_obeyed(
    tmp_path: Path, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    speech = "[red]x[/red] :smile: \x1b[2J\x07\r\u202e[/nope]\nstep 9 é"
    monkeypatch.setattr("counterflow.cli_inspect._tokenizer", lambda run: (lambda ids: speech, None))
    group = make_group(0)
    reasons = [replace(t, finish_reason="\x1b]0;[bold]") for t in group.trajectories]
    run = archive(tmp_path, origin, [[replace(group, trajectories=tuple(reasons))]])
    shown = invoke(run, "--text").stdout
    assert "[red]x[/red] :smile: \\x1b[2J\\x07\\r\\u202e[/nope]\n      step 9 é" in shown
    assert "\\x1b]0;[bold] 2" in shown
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(shown)


def test_limit_beyond_what_the_machine_counts(run: Path) -> None:
    for limit in (2**63 - 2, 2**63 - 1, 2**63, 10**30):
        assert len(rows(run, "--limit", limit)) == 8


def test_damage_hides_the_steps_around_it(tmp_path: Path, origin: Origin) -> None:
    run = archive(tmp_path / "run", origin, [[make_group(n)] for n in range(6)])
    paths = sorted((run / "archive").glob("*.arrow"))
    assert len(paths) > 2
    damaged, after = (int(path.stem) for path in paths[1:3])
    paths[1].unlink()
    paths[1].mkdir()
    for step in (damaged, after + 1):
        assert places(run, "--step", step) == [(step, 0)]
    for arguments in ([], ["--step", damaged + 1]):
        with pytest.raises(ConfigError, match=f"{paths[1]} cannot be read .*restore it from a copy"):
            invoke(run, *arguments)


def test_archive_that_is_no_folder_is_an_empty_one(tmp_path: Path, run: Path) -> None:
    (run / "archive").rename(tmp_path / "away")
    (run / "archive").touch()
    with pytest.raises(ConfigError, match="archive cannot be read .Not a directory.*restore it from a copy"):
        invoke(run)


def test_ids_that_no_tokenizer_gives(tmp_path: Path, origin: Origin, tiny_model: Path) -> None:
    group = make_group(0)
    strange = [replace(t, response_token_ids=np.array([-1, 2**31 - 1, 0], np.int32)) for t in group.trajectories]
    run = archive(tmp_path, origin, [[replace(group, trajectories=tuple(strange))]])
    configure(run, tiny_model)
    assert "0: reward 0, stop, 3 tokens: [-1, 2147483647, 0]\n" in invoke(run, "--text").stdout
