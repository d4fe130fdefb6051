"""Replay: the same groups make the same weights, bit for bit; with overrides it says what it leaves out."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from groups import make_group
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from counterflow import preflight
from counterflow.buffer.archive import Archive
from counterflow.buffer.codec import encode, read_batch
from counterflow.buffer.segment import segments
from counterflow.buffer.shelf import Entry
from counterflow.buffer.trajectory import Group, Origin, Passage, Trajectory
from counterflow.cli import app
from counterflow.configs import dump
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError
from counterflow.learner.checkpoint import CheckpointWriter
from counterflow.learner.trainer import Trainer
from counterflow.place import Place, write_place
from counterflow.recorder import Recorder
from counterflow.records import Ledger

STEPS = 5
LEDGER = Ledger(0, 0, 0, 0, {}, 0, 0, 0, {})


def hard_group(admission: int, version: int) -> Group:
    """Masks, failed samples and empty responses, as a run may have archived them."""
    group = make_group(admission, samples=4, tokens=4, version=version)
    first, second, third, fourth = group.trajectories
    masked = dataclasses.replace(first, loss_mask=np.array([True, False, True, True]), reward=0.1)
    failed = dataclasses.replace(second, reward=None)
    empty = Trajectory(np.empty(0, np.int32), np.empty(0, np.float32), (), 1 / 3, "stop")
    return dataclasses.replace(group, trajectories=(masked, failed, empty, third, fourth))


def batch_of(group: Group, origin: Origin) -> pa.RecordBatch:
    return read_batch(encode(group, origin.schema()), origin)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run folder as a run of five steps leaves it, the groups of step 4 being three versions old; and its weights."""
    folder = tmp_path_factory.mktemp("run")
    config = RunConfig.model_validate(
        {
            "run": {"steps": STEPS, "folder": str(folder.parent), "name": folder.name},
            "model": {"path": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "admission": {"groups_per_step": 2, "samples_per_group": 5, "max_lag": 4},
            "objective": {"kl": {"beta": 0.05}},
            "learner": {"lr": 1e-3},
        }
    )
    origin = preflight.origin_of(config)
    trainer, recorder = Trainer(config), Recorder(folder)
    (folder / "config.yaml").write_text(dump(config))
    write_place(folder, Place("unix:///gone", origin.run_id))
    writer = CheckpointWriter(folder / "checkpoints", origin, config, keep=9)
    with closing(Archive(folder / "archive", origin, segment_bytes=1024)) as archive:
        for step in range(STEPS):
            version = 0 if step == 3 else step
            groups = [hard_group(2 * step, version), make_group(2 * step + 1, samples=5, tokens=5, version=step)]
            entries = [Entry(b"", group, step, step) for group in groups]
            recorder.add_step(trainer.train(entries)[0])
            archive.append(step, [batch_of(group, origin) for group in groups], [Passage(step, step)] * 2)
            if step == 2:
                writer.save(trainer.state(), LEDGER)
                assert writer.wait(60)
    recorder.flush()
    return folder, torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()])


def replayed(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.stdout


def weights_in(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("checkpoint", [0, 3])
def test_same_groups_make_other_weights(run: tuple[Path, torch.Tensor], tmp_path: Path, checkpoint: int) -> None:
    folder, weights = run
    code, said = replayed(str(folder), "--model", str(tmp_path / "model"), "--checkpoint", str(checkpoint))
    assert code == 0 and f"{STEPS - checkpoint} of {STEPS - checkpoint} recorded steps are the same" in said
    assert torch.equal(weights_in(tmp_path / "model"), weights)
    assert "off the run's own policy" not in said


def test_model_that_cannot_be_written_is_noticed_after_the_work(run: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--model .*/file/model cannot be made \(not a directory\)"):
        replayed(str(run[0]), "--model", str(tmp_path / "file" / "model"))


def test_path_that_is_none_is_taken_for_a_name_on_a_hub(run: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="model.path /nowhere: there is no such folder"):
        replayed(str(run[0]), "model.path=/nowhere")


def test_replay_goes_past_its_last_step(run: tuple[Path, torch.Tensor]) -> None:
    code, said = replayed(str(run[0]), "--until", "2")
    assert code == 0 and "2 of 2 recorded steps" in said and len(said.splitlines()) == 4
    with pytest.raises(ConfigError, match=f"ends with step {STEPS}: give --until {STEPS} or less"):
        replayed(str(run[0]), "--until", "9")
    with pytest.raises(ConfigError, match="--until 2 is not after --checkpoint 3"):
        replayed(str(run[0]), "--until", "2", "--checkpoint", "3")


def test_archive_that_lost_its_end_replays_the_same(run: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    segments(folder / "archive")[-1].unlink()
    code, said = replayed(str(folder))
    assert code == 1 and f"the run took {STEPS}: restore the archive's end" in said


def test_override_passes_for_the_run_itself(run: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    code, said = replayed(str(run[0]), "objective.kl.beta=0", "--model", str(tmp_path / "model"))
    assert code == 0 and "off the run's own policy: other objective.kl.beta." in said
    assert not torch.equal(weights_in(tmp_path / "model"), run[1])


def test_override_that_says_what_is_passes_for_another(run: tuple[Path, torch.Tensor]) -> None:
    code, said = replayed(str(run[0]), "objective.kl.beta=0.05")
    assert code == 0 and f"{STEPS} of {STEPS} recorded steps are the same" in said


def test_override_of_what_nobody_reads_is_taken(run: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"override evaluation.every, reward.timeout_s: .* does not read it"):
        replayed(str(run[0]), "reward.timeout_s=9", "evaluation.every=3")


def test_lower_lag_leaves_nothing_or_all_in(run: tuple[Path, torch.Tensor]) -> None:
    _, said = replayed(str(run[0]), "admission.max_lag=2")
    lines = said.splitlines()[1 : STEPS + 1]
    assert [("groups staler than 2, left out: 1" in line) for line in lines] == [False, False, False, True, False]


def test_damage_passes_for_the_run_itself(run: tuple[Path, torch.Tensor], tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run[0], folder)
    recorder = Recorder(folder)
    steps = recorder.records.steps
    steps[-1] = dataclasses.replace(steps[-1], loss=steps[-1].loss + 1e-7)
    recorder.flush()
    code, said = replayed(str(folder))
    assert code == 1 and f"the first that differs is step {STEPS}" in said
    segments(folder / "archive")[0].unlink()
    with pytest.raises(ConfigError, match="begins with step 2, the replay with step 1: begin with a later checkpoint"):
        replayed(str(folder))
    other = shutil.copytree(tiny_model, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    config = (folder / "config.yaml").read_text().replace(str(tiny_model), str(other))
    (folder / "config.yaml").write_text(config)
    with pytest.raises(ConfigError, match="holds another model than the run began with"):
        replayed(str(folder))
