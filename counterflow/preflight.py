"""Everything that can be refused before anything starts: model, task, reward, buffer, room, run folder.

A `RunConfig` flows in; warnings and the run's `Origin` flow out, or one clear error.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from counterflow.actors.environments import resolve_environment
from counterflow.actors.rewards import resolve_rewards
from counterflow.actors.tasks import TaskSet, load_task
from counterflow.buffer.connection import Address
from counterflow.buffer.fitness import check_server
from counterflow.buffer.trajectory import Origin
from counterflow.cluster import Node, bundles, check_room
from counterflow.configs import dump
from counterflow.configs.run import ModelSection
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, first_line
from counterflow.learner.lora import adapt
from counterflow.learner.objective_choice import check_objective
from counterflow.locks import RUN, hold, is_held
from counterflow.models import MODELS
from counterflow.processes import usable_cores
from counterflow.weight_sync.lines import family_of

_LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""What models of several families do to their logits behind the output layer, where the learner reads them."""


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with what its user left to the model: a context that is no longer than the model's own.

    Raises:
        ConfigError: `model.path` holds no model.
    """
    longest = _longest_context(_read_model_config(config.model))
    if "context_length" in config.model.model_fields_set or not longest or config.model.context_length <= longest:
        return config
    return config.replacing("model", context_length=longest)


def check(config: RunConfig, run_id: str | None = None) -> tuple[Origin, TaskSet, list[str]]:
    """See that the run can start; returns its origin, its prompts and warnings worth printing.

    Args:
        run_id: of the run that is resumed in its folder; None: a new run.

    Raises:
        ConfigError: the configuration, or a file it names, cannot be used.
        UnavailableError: the buffer's server, or room for the processes, is missing.
    """
    folder = run_folder(config)
    with _naming_run_folder(config):
        if folder.exists() and not config.run.overwrite and run_id is None:
            raise FileExistsError
        _refuse_living(folder)
    if config.run.ray_address == "local":
        check_room(bundles(config), [Node(len(usable_cores()), _gpus())])
    _check_engine(config)
    _check_model(config.model)
    if config.learner.lora is not None:
        adapt(_without_weights(config.model), config.learner.lora)
    _check_weight_sync(config)
    resolve_rewards(config)
    resolve_environment(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        )
    except Exception as error:  # tokenizers raises the base class itself
        raise ConfigError(
            f"model.path {config.model.path} holds no tokenizer that loads ({first_line(error)}): copy the model again"
        ) from error
    task = load_task(config, tokenizer)
    warnings = check_objective(config).warnings + _warnings(config, task)
    if config.buffer.url:
        warnings += check_server(Address(config.buffer.url, config.buffer.connect_timeout_s))
    return origin_of(config, run_id), task, warnings


def run_folder(config: RunConfig) -> Path:
    """Where the run leaves what it makes."""
    return config.run.folder / config.run.name


def make_run_folder(config: RunConfig) -> Path:
    """Make the run folder, with the resolved configuration in it; an older run goes only if the user said so.

    Raises:
        ConfigError: the folder is there, or cannot be made.
    """
    folder = run_folder(config)
    with _naming_run_folder(config):
        _refuse_living(folder)
        if folder.exists() and config.run.overwrite:
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    return folder


def reopen_run_folder(config: RunConfig) -> Path:
    """The folder of a run that is resumed: with its configuration as it is now, and no word of how it ended before.

    Raises:
        ConfigError: it cannot be written, or its run is going on.
    """
    folder = run_folder(config)
    with _naming_run_folder(config):
        _refuse_living(folder)
        temporary = folder / ".config.yaml.tmp"
        temporary.write_text(dump(config), encoding="utf-8")
        temporary.replace(folder / "config.yaml")
        (folder / "summary.json").unlink(missing_ok=True)
    return folder


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """While the context is open, or this process lives, nobody overwrites the run folder."""
    with hold(folder / RUN) or nullcontext():
        yield


def _refuse_living(folder: Path) -> None:
    if is_held(folder / RUN):
        raise ConfigError(
            f"run folder {folder} belongs to a run that is still going on: choose another run.name, or end that run"
        )


@contextmanager
def _naming_run_folder(config: RunConfig) -> Iterator[None]:
    folder = run_folder(config)
    try:
        yield
    except FileExistsError as error:
        if folder.exists():
            raise ConfigError(
                f"run folder {folder} exists: choose another run.name, or set run.overwrite=true"
            ) from error
        raise ConfigError(f"run.folder {config.run.folder} is not a folder: choose another run.folder") from error
    except OSError as error:
        raise ConfigError(
            f"run.folder {config.run.folder}: {folder} cannot be made ({error.strerror or error}): choose a run.folder "
            "that you may write to"
        ) from error


def _check_engine(config: RunConfig) -> None:
    if config.actors.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "actors.engine is vllm, which is not installed here: pip install 'counterflow[cpu]' or 'counterflow[gpu]', "
            "or set actors.engine=transformers, which is slow"
        )


def _check_weight_sync(config: RunConfig) -> None:
    sync = config.weight_sync
    if config.run.ray_address != "local":
        # Other hosts may know other names, and see other folders.
        return
    if sync.host is not None:
        try:
            socket.create_server((sync.host, 0), family=family_of(sync.host)).close()
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"weight_sync.host {sync.host} is no address of this host ({first_line(error)}): leave it out, or name "
                "one at which actors reach the learner"
            ) from error
    if sync.transport == "disk" and sync.folder is not None:
        try:
            sync.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=sync.folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"weight_sync.folder {sync.folder} cannot be written ({error.strerror or error}): name a folder that "
                "you may write to"
            ) from error


def _check_model(model: ModelSection) -> None:
    config = _read_model_config(model)
    if not any(next(model.path.glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        raise ConfigError(
            f"model.path {model.path} holds no weights (no *.safetensors or pytorch_model*.bin there): copy the model "
            "again"
        )
    longest = _longest_context(config)
    if longest and model.context_length > longest:
        raise ConfigError(
            f"model.context_length={model.context_length} is more than the {longest} positions of the model in "
            f"{model.path}: lower it to {longest} or less"
        )
    for name in _LOGIT_SCALES:
        if getattr(config, name, None) not in (None, 1):
            raise ConfigError(
                f"model.path {model.path}: its config.json has {name}={getattr(config, name)}, which the learner's "
                "log-probs would leave out: choose a model without it"
            )


def _without_weights(model: ModelSection) -> torch.nn.Module:
    """The model's modules, of no memory."""
    with torch.device("meta"):
        empty: torch.nn.Module = AutoModelForCausalLM.from_config(
            _read_model_config(model), trust_remote_code=model.trust_remote_code
        )
    return empty


def _read_model_config(model: ModelSection) -> Any:
    """What transformers makes of `config.json`, the part about text."""
    path = model.path
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        known = next((name for name in MODELS if path.name == name), None)
        remedy = f"make it with `counterflow model {known} {path}`" if known else "check the path"
        raise ConfigError(
            f"model.path {path} is not a Hugging Face model folder (no config.json there): {remedy}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {path}: its config.json cannot be read ({first_line(error)}): copy the model again"
        ) from error
    try:
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=model.trust_remote_code
        ).get_text_config()
    except Exception as error:  # a model may bring code of its own
        raise ConfigError(
            f"model.path {path}: transformers cannot use its config.json ({first_line(error)}): copy the model again, "
            "or set model.trust_remote_code=true if it brings code that you trust"
        ) from error


def _longest_context(model_config: Any) -> int | None:
    """Positions the model was made for, as vLLM counts them; None where it does not say."""
    positions = getattr(model_config, "max_position_embeddings", None)
    rope = getattr(model_config, "rope_parameters", None) or {}
    if positions and rope.get("rope_type") in ("linear", "dynamic"):
        return int(positions * (rope.get("factor") or 1))
    return positions


def origin_of(config: RunConfig, run_id: str | None = None) -> Origin:
    """What the groups of a run share; `run_id` is a new one where none is given."""
    return Origin(
        run_id=run_id or f"{config.run.name}-{secrets.token_hex(4)}",
        model_fingerprint=_fingerprint(
            config.model.path, ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
        ),
        tokenizer_fingerprint=_fingerprint(
            config.model.path, ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "*.model")
        ),
        sampling=json.dumps(config.sampling.model_dump(), sort_keys=True),
    )


def _fingerprint(folder: Path, patterns: tuple[str, ...]) -> str:
    """The first 16 hex digits of a SHA-256 over name, size and first mebibyte of each matching file, by path.

    What differs only past the first mebibyte of a file of the same size is not told apart.
    """
    digest = hashlib.sha256()
    for path in sorted(p for pattern in patterns for p in folder.glob(pattern)):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def _warnings(config: RunConfig, task: TaskSet) -> list[str]:
    warnings = []
    if task.overlong:
        warnings.append(f"{task.overlong} prompts were too long for model.context_length and dropped")
    if config.actors.engine == "transformers":
        warnings.append(
            "actors.engine=transformers answers one prompt at a time and is many times slower than vllm: for machines "
            "where vLLM cannot be installed"
        )
    return warnings


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
