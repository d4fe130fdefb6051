"""Checkpoints: written whole or not, and what is loaded goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import make_group

from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Origin
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.checkpoint import (
    CheckpointWriter,
    checkpoint_path,
    load_checkpoint,
    read_manifest,
    versions,
)
from counterflow.learner.trainer import Trainer
from counterflow.records import Ledger
from counterflow.resume import Resumption, check_resumable

ORIGIN = Origin("run", "model", "tokenizer", "{}")
LEDGER = Ledger(
    generated=8,
    trained=4,
    buffered=3,
    in_flight=1,
    dropped={},
    tokens_generated=80,
    tokens_trained=50,
    tokens_buffered=30,
    tokens_dropped={},
)


def configured(model: Path, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 2, "samples_per_group": 3, "max_lag": 99},
            "objective": {"kl": {"beta": 0.05, "schedule": "adaptive"}},
            "learner": {"lr": 1e-3, "warmup_steps": 2, **learner},
        }
    )


def entries(step: int) -> list[Entry]:
    groups = [make_group(2 * step + i, samples=3, tokens=3 + step % 3) for i in range(2)]
    return [Entry(b"", group, 0, 0) for group in groups]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()])


def write(folder: Path, trainer: Trainer, config: RunConfig, keep: int = 2, said: list[str] | None = None) -> Path:
    writer = CheckpointWriter(folder, ORIGIN, config, keep, (said if said is not None else []).append)
    assert writer.save(trainer.state(), LEDGER) and writer.wait(60)
    return checkpoint_path(folder, trainer.version)


def load(path: Path, config: RunConfig, origin: Origin = ORIGIN) -> Trainer:
    trainer = Trainer(config)
    trainer.load_state(load_checkpoint(path, read_manifest(path, origin, config), trainer.state()))
    return trainer


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> tuple[RunConfig, Trainer]:
    """A trainer after three steps."""
    config = configured(tiny_model)
    trainer = Trainer(config)
    for step in range(3):
        trainer.train(entries(step))
    return config, trainer


@pytest.fixture(scope="module")
def saved(trained: tuple[RunConfig, Trainer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("saved"), trained[1], trained[0])


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """One that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints" / saved.name))


def test_weights_after_a_checkpoint_differ_from_those_without_one(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model)
    whole = Trainer(config)
    for step in range(3):
        whole.train(entries(step))
    path = write(tmp_path, whole, config)
    rest = [whole.train(entries(step))[0] for step in range(3, 6)]
    torch.rand(7)  # Somebody uses the generator meanwhile.
    resumed = load(path, config)
    assert resumed.version == 3
    again = [resumed.train(entries(step))[0] for step in range(3, 6)]
    assert torch.equal(weights(resumed), weights(whole)) and again == rest
    assert json.loads((path / "checkpoint.json").read_text())["ledger"]["trained"] == 4


def test_what_is_written_is_what_a_later_step_made_of_it(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model)
    trainer = Trainer(config)
    trainer.train(entries(0))
    before = weights(trainer).clone()
    writer = CheckpointWriter(tmp_path, ORIGIN, config, 2)
    writer.save(trainer.state(), LEDGER)
    trainer.train(entries(1))
    assert writer.wait(60)
    assert torch.equal(weights(load(checkpoint_path(tmp_path, 1), config)), before)


def test_more_or_other_checkpoints_are_kept_than_the_newest(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tiny_model)
    trainer = Trainer(config)
    for step in range(4):
        trainer.train(entries(step))
        write(tmp_path, trainer, config)
    assert versions(tmp_path) == [3, 4] and len(list(tmp_path.iterdir())) == 2
    write(tmp_path, trainer, config)
    assert versions(tmp_path) == [3, 4], "the same version again takes the place of the first"


def test_half_written_checkpoint_is_chosen_or_stays(copied: Path, trained: tuple[RunConfig, Trainer]) -> None:
    folder = copied.parent
    copied.rename(folder / f".{copied.name}.tmp")
    assert versions(folder) == []
    CheckpointWriter(folder, ORIGIN, trained[0], 2)
    assert list(folder.iterdir()) == []


def test_full_disk_costs_the_checkpoints_before_or_ends_the_run(
    copied: Path, trained: tuple[RunConfig, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, trainer = trained
    state = trainer.state()
    later = dataclasses.replace(state, values={**state.values, "version": 4})
    said: list[str] = []

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer = CheckpointWriter(copied.parent, ORIGIN, config, 2, said.append)
    assert writer.save(later, LEDGER) and writer.wait(60)
    monkeypatch.undo()
    (words,) = said
    assert "version 4 got no checkpoint (No space left on device)" in words and "that of version 3 stays" in words
    assert [path.name for path in copied.parent.iterdir()] == [copied.name]
    assert load(copied, config).version == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB: room for one checkpoint, and not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_disk_that_is_really_full_leaves_half_a_checkpoint(
    small_disk: Path, trained: tuple[RunConfig, Trainer]
) -> None:
    config, trainer = trained
    state, said = trainer.state(), list[str]()
    folder = small_disk / "checkpoints"
    writer = CheckpointWriter(folder, ORIGIN, config, 2, said.append)
    assert writer.save(state, LEDGER) and writer.wait(60) and said == []
    (small_disk / "others").write_bytes(bytes(1 << 20))
    later = dataclasses.replace(state, values={**state.values, "version": 4})
    assert writer.save(later, LEDGER) and writer.wait(60)
    (words,) = said
    assert "version 4 got no checkpoint (" in words and "that of version 3 stays" in words
    assert [path.name for path in folder.iterdir()] == ["00000003"]
    assert torch.equal(weights(load(checkpoint_path(folder, 3), config)), weights(trainer))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    ("damage", "words"), [(cut, "of .* bytes"), (flip, "is damaged"), (Path.unlink, "cannot be read")]
)
def test_damaged_shard_is_loaded(copied: Path, trained: tuple[RunConfig, Trainer], name: str, damage: Any, words: str):
    damage(copied / name)
    with pytest.raises(ConfigError, match=rf"{name}.*{words}.*--checkpoint VERSION \(0, the model itself\)"):
        load(copied, trained[0])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_run_without_a_whole_checkpoint_is_begun(copied: Path, trained: tuple[RunConfig, Trainer], damage: Any) -> None:
    """The supervisor looks before it opens the run's folder."""
    run, resumption = copied.parent.parent, Resumption(ORIGIN.run_id, None, lose_branch=True)
    check_resumable(run, trained[0], ORIGIN, resumption)
    damage(copied / "__0_0.distcp")
    with pytest.raises(ConfigError, match=r"__0_0.distcp.*--checkpoint VERSION"):
        check_resumable(run, trained[0], ORIGIN, resumption)


def test_pickle_in_a_checkpoint_may_run_code(copied: Path, trained: tuple[RunConfig, Trainer]) -> None:
    """The checksums are made to fit: what remains is what a pickle may name."""

    class Trap:
        def __reduce__(self) -> Any:
            return os.system, ("touch " + str(copied.parent / "sprung"),)

    manifest = read_manifest(copied, ORIGIN, trained[0])
    (copied / ".metadata").write_bytes(pickle.dumps(Trap()))
    files = {name: sizes for name, sizes in manifest.files.items() if name != ".metadata"}
    trainer = Trainer(trained[0])
    with pytest.raises(ConfigError, match=r"system has no place in the metadata.*restore it from a copy"):
        load_checkpoint(copied, dataclasses.replace(manifest, files=files), trainer.state())
    assert not (copied.parent / "sprung").exists()


def test_checkpoint_of_another_kind_is_loaded(copied: Path, trained: tuple[RunConfig, Trainer]) -> None:
    config = trained[0]
    other_model = dataclasses.replace(ORIGIN, model_fingerprint="other")
    with pytest.raises(ConfigError, match="is of another model: its model_fingerprint is 'model', ours is 'other'"):
        read_manifest(copied, other_model, config)
    with pytest.raises(ConfigError, match="is of another run"):
        read_manifest(copied, dataclasses.replace(ORIGIN, run_id="other"), config)
    with pytest.raises(ConfigError, match="under another configuration, which differs in learner.lr, learner.warmup"):
        read_manifest(copied, ORIGIN, configured(config.model.path, lr=2e-3, warmup_steps=1))
    with pytest.raises(ConfigError, match="no checkpoint of|is no checkpoint"):
        read_manifest(copied.parent / "00000009", ORIGIN, config)
    (copied / "checkpoint.json").write_text("{")
    with pytest.raises(ConfigError, match=r"checkpoint.json cannot be read.*--checkpoint"):
        read_manifest(copied, ORIGIN, config)


def test_checkpoint_of_another_shape_is_loaded(
    copied: Path, trained: tuple[RunConfig, Trainer], tmp_path: Path
) -> None:
    from llamas import save_llama

    save_llama(tmp_path / "wide", hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    trainer = Trainer(configured(tmp_path / "wide"))
    with pytest.raises(ConfigError, match=r"does not fit what is to be trained.*leave out .* --checkpoint 0"):
        load_checkpoint(copied, read_manifest(copied, ORIGIN, trained[0]), trainer.state())


def test_run_on_cpus_goes_on_upon_a_gpu_no_more(copied: Path, trained: tuple[RunConfig, Trainer]) -> None:
    trainer = Trainer(trained[0])
    state = trainer.state()
    on_gpu = {**state.tensors["random"], "cuda": torch.zeros(16, dtype=torch.uint8)}
    expected = dataclasses.replace(state, tensors={**state.tensors, "random": on_gpu})
    loaded = load_checkpoint(copied, read_manifest(copied, ORIGIN, trained[0]), expected)
    assert loaded.tensors["random"].keys() == {"cpu"}
    trainer.load_state(loaded)
    assert torch.equal(weights(trainer), weights(trained[1]))


def test_slow_disk_piles_up_checkpoints(tmp_path: Path, trained: tuple[RunConfig, Trainer]) -> None:
    config, trainer = trained
    said: list[str] = []
    writer = CheckpointWriter(tmp_path, ORIGIN, config, 2, said.append)
    began = [writer.save(trainer.state(), LEDGER) for _ in range(2)]
    assert writer.wait(60) and (began == [True, False]) == bool(said)
    assert np.all([words.startswith("version 3 got no checkpoint, since") for words in said])
