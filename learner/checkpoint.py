"""Checkpoints: versions of the trainer on the disk, in the folder `checkpoints` of a run, each written whole or not.

Trainer states flow in and out. The tensors lie as torch's distributed checkpoints lie, so that shards of any number of
ranks may be read by any other; beside them `checkpoint.json` says what they belong to and the checksum of each file.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from counterflow.buffer.trajectory import Origin
from counterflow.configs import as_data, dump
from counterflow.configs.resumable import differing_keys
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, first_line
from counterflow.learner.checkpoint_reader import CheckpointReader
from counterflow.learner.trainer import TrainerState
from counterflow.place import read_json
from counterflow.records import Ledger

FORMAT = 1
_MANIFEST = "checkpoint.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of. The prompt cursor is not in it: prompts follow from seed and admission number."""

    format: int
    version: int
    run_id: str
    model_fingerprint: str
    config: str
    """The resolved configuration, as YAML."""
    values: dict[str, float | int]
    """Of the trainer's state."""
    ledger: dict[str, Any]
    """Where every group was when the version was saved."""
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of each file."""


class CheckpointWriter:
    """Saves checkpoints in the background, one at a time, and keeps the newest ones.

    Args:
        folder: where they lie; made if absent. What a killed process left half-written there is removed.
        keep: how many stay.
        tell: takes what the run's owner should know, a sentence at a time, from any thread.
    """

    def __init__(
        self, folder: Path, origin: Origin, config: RunConfig, keep: int, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._folder, self._origin, self._config = folder, origin, dump(config)
        self._keep, self._tell = keep, tell
        self._thread: threading.Thread | None = None
        for left in folder.glob(".*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def save(self, state: TrainerState, ledger: Ledger) -> bool:
        """Copy the state out of the optimizer's way and begin to write it; False while another is being written."""
        version = int(state.values["version"])
        if self._thread is not None and self._thread.is_alive():
            self._tell(
                f"version {version} got no checkpoint, since that of an earlier one is still being written: raise "
                "checkpoint.every"
            )
            return False
        copied = _copy(state.tensors)
        manifest = Manifest(
            format=FORMAT,
            version=version,
            run_id=self._origin.run_id,
            model_fingerprint=self._origin.model_fingerprint,
            config=self._config,
            values=state.values,
            ledger=asdict(ledger),
            files={},
        )
        self._thread = threading.Thread(
            target=self._save, args=(copied, manifest), name=f"checkpoint {version}", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait for what is being written; False when it is not done in time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _save(self, tensors: dict[str, Any], manifest: Manifest) -> None:
        temporary = self._folder / f".{manifest.version:08d}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(temporary, tensors, manifest)
            final = checkpoint_path(self._folder, manifest.version)
            if final.exists():
                _remove(final)
            temporary.rename(final)
            _sync(self._folder)
            for old in versions(self._folder)[: -self._keep]:
                _remove(checkpoint_path(self._folder, old))
        except (CheckpointException, OSError, RuntimeError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            kept = versions(self._folder) if self._folder.is_dir() else []
            self._tell(
                f"version {manifest.version} got no checkpoint ({_cause(error)}): see that the disk of {self._folder} "
                f"has room and lets this user write; {f'that of version {kept[-1]} stays' if kept else 'none is there'}"
            )


def versions(folder: Path) -> list[int]:
    """The versions that have a whole checkpoint in this folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if re.fullmatch(r"\d{8,}", path.name))


def chosen_version(folder: Path, asked: int | None) -> int:
    """The version to begin with: the one asked for, else that of the newest checkpoint, else 0, the model itself.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    there = versions(folder)
    if asked is None:
        return there[-1] if there else 0
    if asked and asked not in there:
        listed = ", ".join(map(str, [0, *there]))
        raise ConfigError(f"--checkpoint {asked}: {folder} has none of that version: choose one of {listed}")
    return asked


def checkpoint_path(folder: Path, version: int) -> Path:
    """Where the checkpoint of a version lies."""
    return folder / f"{version:08d}"


def read_manifest(path: Path, origin: Origin, config: RunConfig) -> Manifest:
    """What a checkpoint is of, if it is one of this run, with every file of its length. What they hold is not read.

    Raises:
        ConfigError: it is of another model, run, configuration or format; a file is missing or cut short.
    """
    manifest = read_json(path / _MANIFEST, Manifest, _mend(path))
    if manifest is None:
        raise ConfigError(f"{path} is no checkpoint (no {_MANIFEST} there): {_mend(path)}")
    if manifest.format != FORMAT:
        raise ConfigError(f"{path} is a checkpoint of another version of Counterflow (format {manifest.format})")
    for name in ("model_fingerprint", "run_id"):
        there, ours = getattr(manifest, name), getattr(origin, name)
        if there != ours:
            raise ConfigError(
                f"{path} is of another {name.partition('_')[0]}: its {name} is {there!r}, ours is {ours!r}"
            )
    if keys := differing_keys(yaml.safe_load(manifest.config), as_data(config)):
        raise ConfigError(f"{path} was made under another configuration, which differs in {', '.join(keys)}")
    for name, (size, _) in manifest.files.items():
        with _naming(path / name):
            if (there := (path / name).stat().st_size) != size:
                raise ConfigError(f"{path / name} has {there:,} of {size:,} bytes: {_mend(path)}")
    return manifest


def load_checkpoint(path: Path, manifest: Manifest, state: TrainerState) -> TrainerState:
    """The state that was saved, read into the tensors of `state`, which say what is expected.

    Raises:
        ConfigError: a file cannot be read or is damaged, or it holds other tensors, or ones of another shape.
    """
    for name, (_, checksum) in manifest.files.items():
        with _naming(path / name):
            if _checksum(path / name) != checksum:
                raise ConfigError(f"{path / name} is damaged (its checksum does not fit): {_mend(path)}")
    reader = CheckpointReader(path)
    try:
        tensors = _less_of_gpus(state.tensors, reader.read_metadata())
        with warnings.catch_warnings():
            # That no process group is there is what `no_dist` says.
            warnings.simplefilter("ignore", UserWarning)
            load(tensors, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, pickle.UnpicklingError) as error:
        # torch's words for a missing tensor and for another shape; all else is not the configuration's fault.
        if not isinstance(_first_failure(error), RuntimeError | ValueError):
            raise ConfigError(f"{path} cannot be read ({_cause(error)}): {_mend(path)}") from error
        raise ConfigError(
            f"{path} does not fit what is to be trained ({_cause(error)}): leave out what changes its tensors, as "
            "learner.lora, or begin with --checkpoint 0, the model itself"
        ) from error
    return TrainerState(tensors, manifest.values)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): {_mend(path.parent)}") from error


def _mend(path: Path) -> str:
    others = ", ".join(str(v) for v in versions(path.parent) if checkpoint_path(path.parent, v) != path)
    return (
        "restore it from a copy, or resume with --checkpoint VERSION"
        f" ({f'there are {others}, and 0' if others else '0'}, the model itself): from an older one the archive is "
        "trained again"
    )


def _write(folder: Path, tensors: dict[str, Any], manifest: Manifest) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    save(tensors, storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=True)
    files = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(folder.iterdir())}
    with (folder / _MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**asdict(manifest), "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a half-removed one is never taken for one."""
    gone = path.with_name(f".{path.name}.old.tmp")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _copy(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copy(value) if isinstance(value, Mapping) else value.detach().to("cpu", copy=True)
        for name, value in tensors.items()
    }


def _less_of_gpus(tensors: Mapping[str, Any], saved: Metadata) -> dict[str, Any]:
    """What is expected, without the state of a GPU's generator where the run was on none: that one begins anew."""
    random = {
        device: state
        for device, state in tensors["random"].items()
        if device == "cpu" or f"random.{device}" in saved.state_dict_metadata
    }
    return {**tensors, "random": random}


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found = zlib.crc32(chunk, found)
    return found


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_failure(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _cause(error: BaseException) -> str:
    """What went wrong on the first rank."""
    error = _first_failure(error)
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or first_line(error)
