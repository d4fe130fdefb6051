"""Everything that can be refused before anything starts: model, task, reward, buffer, room, run folder.

A `RunConfig` flows in; warnings and the run's `Origin` flow out, or one clear error.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from counterflow.actors.rewards import resolve_reward
from counterflow.actors.tasks import TaskSet, load_task
from counterflow.buffer.connection import Address, check_server
from counterflow.buffer.trajectory import Origin
from counterflow.cluster import Node, bundles, check_room
from counterflow.configs import dump
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.objective_choice import check_objective
from counterflow.models import MODELS
from counterflow.processes import usable_cores


def check(config: RunConfig) -> tuple[Origin, TaskSet, list[str]]:
    """See that the run can start; returns its origin, its prompts and warnings worth printing.

    Raises:
        ConfigError: the configuration, or a file it names, cannot be used.
        UnavailableError: the buffer's server, or room for the processes, is missing.
    """
    folder = run_folder(config)
    if folder.exists() and not config.run.overwrite:
        raise ConfigError(f"run folder {folder} exists: choose another run.name, or set run.overwrite=true")
    if config.run.ray_address == "local":
        check_room(bundles(config), [Node(len(usable_cores()), _gpus())])
    _check_model(config.model.path)
    resolve_reward(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {config.model.path} holds no tokenizer: {_first_line(error)}") from error
    task = load_task(config, tokenizer)
    warnings = check_objective(config).warnings + _warnings(config, task)
    if config.buffer.url:
        warnings += check_server(Address(config.buffer.url, config.buffer.connect_timeout_s))
    return _origin(config), task, warnings


def run_folder(config: RunConfig) -> Path:
    """Where the run leaves what it makes."""
    return config.run.folder / config.run.name


def make_run_folder(config: RunConfig) -> Path:
    """Make the run folder, with the resolved configuration in it; an older run goes only if the user said so."""
    folder = run_folder(config)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    return folder


def _check_model(path: Path) -> None:
    if not (path / "config.json").is_file():
        known = next((name for name in MODELS if path.name == name), None)
        remedy = f"make it with `counterflow model {known} {path}`" if known else "check the path"
        raise ConfigError(f"model.path {path} is not a Hugging Face model folder (no config.json there): {remedy}")


def _origin(config: RunConfig) -> Origin:
    return Origin(
        run_id=f"{config.run.name}-{secrets.token_hex(4)}",
        model_fingerprint=_fingerprint(config.model.path, ("config.json", "*.safetensors", "*.safetensors.index.json")),
        tokenizer_fingerprint=_fingerprint(config.model.path, ("tokenizer.json", "tokenizer_config.json", "*.model")),
        sampling=json.dumps(config.sampling.model_dump(), sort_keys=True),
    )


def _fingerprint(folder: Path, patterns: tuple[str, ...]) -> str:
    """SHA-256 over the matching files: small ones whole, weights by size and their first mebibyte."""
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
    return warnings


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
