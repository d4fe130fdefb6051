"""What may go wrong between a YAML file and a run: misspelt keys, silent coercions, secrets, texts that change."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.configs import RunConfig, describe, dump, load_config
from counterflow.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_no_file_and_empty_file_give_the_defaults(tmp_path: Path) -> None:
    assert load_config(None, []) == RunConfig() == load_config(write(tmp_path, ""), [])
    assert load_config(write(tmp_path, "run:\n  # steps: 3\n"), []) == RunConfig()


def test_overrides_have_the_type_of_their_key(tmp_path: Path) -> None:
    path = write(tmp_path, "learner:\n  lr: 1.0e-5\n  warmup_steps: 3\n")
    overrides = [
        "learner.lr=3e-4", "reward.shuffle=true", "admission.max_lag=inf", "sampling.stop=[a,b]", "buffer.url=null",
        "objective.importance.cap=.inf", "task.parameters.min_words=3", "learner.betas=[0.9,0.95]",
    ]  # fmt: skip
    config = load_config(path, overrides)
    assert (config.learner.lr, config.learner.warmup_steps) == (3e-4, 3)
    assert config.reward.shuffle is True
    assert config.admission.max_lag == math.inf == config.objective.importance.cap
    assert config.sampling.stop == ["a", "b"]
    assert config.buffer.url is None
    assert config.task.parameters == {"min_words": 3}
    assert config.learner.betas == (0.9, 0.95)


def test_a_later_override_wins() -> None:
    assert load_config(None, ["run.steps=3", "run.steps=5"]).run.steps == 5


def test_file_reads_numbers_as_people_write_them(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "learner: {lr: 3e-4}\nadmission: {max_lag: inf}\n"), [])
    assert config.learner.lr == 3e-4
    assert config.admission.max_lag == math.inf


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learner.lrr", "learner.lr"),
        ("admision.max_lag", "admission"),
        ("steps", "run.steps"),
        ("learner.max_lag", "admission.max_lag"),
        ("objective.kl.betta", "objective.kl.beta"),
        ("weight_sync.timeout", "weight_sync.timeout_s"),
    ],
)
def test_misspelt_key_names_the_nearest(key: str, nearest: str) -> None:
    text = refusal(None, f"{key}=1")
    assert "\n" not in text
    assert "did you mean" in text
    assert nearest in text


def test_unknown_key_without_a_near_one_lists_the_section() -> None:
    assert "metrics has host, port" in refusal(None, "metrics.zzzzzzzz=1")


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("run: {steps: 0}", "run.steps=0: must be greater than or equal to 1"),
        ("run: {steps: many}", "run.steps=many: must be a valid integer"),
        ("run: {steps: true}", "run.steps=true: must be a number"),
        ("run: {steps: 2.5}", "run.steps=2.5: must be a valid integer"),
        ("run: {name: a/b}", "run.name=a/b: must match pattern"),
        ("learner: {dtype: int8}", "learner.dtype=int8: must be 'float32' or 'bfloat16'"),
        ("learner: {lr: inf}", "learner.lr=inf: must be a finite number"),
        ("learner: 3", "learner=3: must be a section with keys (ranks, backend, offload, cpus, gpus"),
        ("learner: {lora: true}", "learner.lora=true: must be a section with keys (rank, alpha, targets)"),
        ("learner: {lora: {rnk: 3}}", "learner.lora.rnk: there is no such key: did you mean learner.lora.rank?"),
        ("admission: {max_lag: 1.5}", "admission.max_lag: it counts versions: a whole number, or inf"),
        ("sampling: {stop: [a, 3]}", "sampling.stop.1=3: must be a valid string"),
        ("sampling: {stop: ['']}", "sampling.stop.0=: must have at least 1 character"),
        ("run: {name: ..}", "run.name=..: must match pattern"),
        ("run: {name: .}", "run.name=.: must match pattern"),
        ("learner: {betas: [0.9, 1.0]}", "learner.betas.1=1.0: must be less than 1"),
        ("learner: {betas: [-0.1, 0.9]}", "learner.betas.0=-0.1: must be greater than or equal to 0"),
        ("learner: {betas: [.nan, 0.9]}", "learner.betas.0=.nan: must be less than 1"),
        ("evaluation: {success: .nan}", "evaluation.success=.nan: must be a finite number"),
        (
            "buffer: {capacity_groups: 8}",
            "buffer.capacity_groups=8 is below admission.groups_per_step=32, so that no step could ever be filled",
        ),
        ("actors: {kv_cache_bytes: null}", "actors.kv_cache_bytes=null lets vLLM take nearly all memory"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(tmp_path: Path, yaml: str, said: str) -> None:
    path = write(tmp_path, yaml)
    text = refusal(path)
    assert text.startswith(f"{path}: {said}")
    assert "\n" not in text


def test_each_problem_has_its_line_and_its_source(tmp_path: Path) -> None:
    path = write(tmp_path, "run: {steps: 0}\nlearner: {lr: -1}\n")
    lines = refusal(path, "sampling.top_p=2").splitlines()
    assert len(lines) == 3
    assert sorted(line.partition(":")[0] for line in lines) == sorted([str(path), str(path), "override"])


def test_keys_that_do_not_fit_together_hide_where_they_were_written(tmp_path: Path) -> None:
    path = write(tmp_path, "buffer: {capacity_groups: 8}\nrun: {steps: 3}\n")
    assert refusal(path, "run.seed=1").startswith(f"{path}: buffer.capacity_groups=8 ")
    assert refusal(path, "admission.groups_per_step=9").startswith("override: buffer.capacity_groups=8 ")
    assert load_config(path, ["admission.groups_per_step=8"]).buffer.capacity_groups == 8


def test_cache_that_vllm_sizes_is_refused_on_gpus() -> None:
    assert load_config(None, ["actors.kv_cache_bytes=null", "actors.gpus=1"]).actors.kv_cache_bytes is None


@pytest.mark.parametrize(
    ("text", "line"), [("run:\n  steps: [1\nlearner: 2\n", 3), ("run: {}\nrun: {}\n", 2), ("a: b: c", 1)]
)
def test_malformed_yaml_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    path = write(tmp_path, text)
    said = refusal(path)
    assert f"{path}, line {line}: malformed YAML" in said
    assert "\n" not in said


@pytest.mark.parametrize("text", ["- a\n- b\n", "hello", "3"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "must hold sections" in refusal(write(tmp_path, text))


def test_missing_folder_and_binary_files_are_refused(tmp_path: Path) -> None:
    assert "no such configuration file" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(tmp_path / "binary.yaml")


@pytest.mark.parametrize("override", ["learner.lr", "=3", "learner..lr=3", "learner.=3", "", "sampling.stop=[a"])
def test_malformed_override_is_refused(override: str) -> None:
    text = refusal(None, override)
    assert text.startswith("override ")
    assert "\n" not in text


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host:6379/0",
        "redis://hunter2@host",
        "rediss://user:hunter2@host/1",
        "redis://host:6379/0?password=hunter2",
        "redis://:hun/ter2@host:hunter2",
        "redis://[:hunter2@host",
    ],
)
def test_a_password_in_the_url_is_refused_and_never_echoed(tmp_path: Path, url: str) -> None:
    path = write(tmp_path, f"buffer:\n  url: '{url}'\nlearner: {{lr: -1}}\n")
    for text in (refusal(path), refusal(None, f"buffer.url={url}"), refusal(None, "run.steps=0", f"buffer.url={url}")):
        assert "ter2" not in text
        assert "COUNTERFLOW_REDIS_PASSWORD" in text or "not a URL" in text


def test_secrets_in_the_wrong_place_are_not_echoed() -> None:
    for override in ("buffer.password=hunter2", "buffer=redis://:hunter2@host", "buffer.url:redis://:hunter2@host"):
        assert "hunter2" not in refusal(None, override)
    assert "COUNTERFLOW_REDIS_PASSWORD" in refusal(None, "buffer.password=hunter2")


def test_a_plain_url_is_accepted() -> None:
    assert load_config(None, ["buffer.url=redis://host:6379/0"]).buffer.url == "redis://host:6379/0"


def test_interpolation_that_leads_nowhere_is_a_config_error(tmp_path: Path) -> None:
    assert "\\${" in refusal(write(tmp_path, "run: {name: '${nowhere.key}'}"))
    assert "\\${" in refusal(write(tmp_path, "run: {name: '${'}"))


def test_every_key_is_described() -> None:
    text = describe(RunConfig())
    assert text.count("# ") >= sum(len(type(section).model_fields) for _, section in RunConfig())
    assert max(map(len, text.splitlines())) <= 120


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "3e-4",
        "1:30",
        "${x}",
        "\\${x}",
        "\\",
        "null",
        "true",
        ".inf",
        "???",
        "a: b",
        "# c",
        "a\n\n b ",
        "é\u2028\x85",
        "0x1F",
        "",
    ]
)


@settings(max_examples=30)
@given(
    stop=st.lists(texts.filter(bool), max_size=3),
    system_prompt=st.none() | texts,
    parameters=st.dictionaries(
        st.text("abc_", min_size=1), st.integers() | texts | st.booleans() | st.none(), max_size=2
    ),
    max_lag=st.sampled_from([0, 4, math.inf]),
    lr=st.floats(1e-300, 1e300),
)
def test_written_configuration_loads_back_to_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    stop: list[str],
    system_prompt: str | None,
    parameters: dict[str, object],
    max_lag: float,
    lr: float,
) -> None:
    config = RunConfig.model_validate(
        {
            "sampling": {"stop": stop},
            "task": {"system_prompt": system_prompt, "parameters": parameters},
            "admission": {"max_lag": max_lag},
            "learner": {"lr": lr},
        }
    )
    folder = tmp_path_factory.mktemp("config")
    assert load_config(write(folder, describe(config)), []) == config
    assert load_config(write(folder, dump(config)), []) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["admission.run_ahead=8"], "admission.run_ahead=8 is not read with admission.staleness=wait"),
        (["admission.staleness=drop"], "admission.staleness=drop has nothing to act on"),
        (["admission.staleness=downweight", "admission.max_lag=inf", "buffer.order=ready"], "nothing to act on"),
        (["admission.staleness=drop", "admission.run_ahead=3"], "admission.run_ahead=3 is below admission.max_lag=4"),
        (["admission.staleness=drop", "admission.run_ahead=8", "buffer.uses=2"], "between two uses"),
        (["admission.staleness=drop", "admission.run_ahead=4.5"], "a whole number, or inf"),
        (["reward.name=math_verify", "reward.parts={exact: 1}"], "name=math_verify is not read where parts are given"),
        (["reward.parts={}"], "reward.parts"),
    ],
)
def test_policy_that_cannot_act_is_accepted(overrides: list[str], message: str) -> None:
    assert message in refusal(None, *overrides)


def test_policy_that_can_act_is_refused() -> None:
    ready = ["buffer.order=ready", "admission.staleness=withhold_keep_baseline"]
    assert load_config(None, ready).admission.versions_ahead == 4
    ahead = load_config(None, ["admission.staleness=mask_tokens", "admission.run_ahead=inf"])
    assert (ahead.admission.versions_ahead, ahead.admission.max_lag) == (math.inf, 4)
    parts = load_config(None, ["reward.parts={exact: 1, 'my.rewards:brevity': -0.5}"]).reward.parts
    assert parts == {"exact": 1.0, "my.rewards:brevity": -0.5}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("weight_sync.timeout_s=1e300",), "weight_sync.timeout_s"),
        (("weight_sync.host=0.0.0.0",), "weight_sync.host: .* name one at which actors reach the learner"),
        (("weight_sync.host=''",), "weight_sync.host"),
        (("weight_sync.transport=disk", "weight_sync.host=a"), "weight_sync.host is read by broadcasts alone"),
    ],
)
def test_weight_sync_fails_hours_later_for_a_key(overrides: tuple[str, ...], words: str) -> None:
    assert re.search(words, refusal(None, *overrides))
