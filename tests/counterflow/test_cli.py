"""The command line as a whole: an output that cannot be written, and folders that are no run's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from groups import make_group

from counterflow.buffer.archive import Archive
from counterflow.buffer.codec import to_batch
from counterflow.buffer.trajectory import Origin
from counterflow.configs import RunConfig, dump
from counterflow.place import Place, write_place
from counterflow.recorder import RunRecords, summarize, write_summary
from counterflow.records import Ledger

COMMANDS = [("ledger",), ("ledger", "--json"), ("inspect",), ("inspect", "--json"), ("config",)]


@pytest.fixture
def run(tmp_path: Path, origin: Origin) -> Path:
    """An ended run of one step of 200 groups."""
    folder = tmp_path / "run"
    archive = Archive(folder / "archive", origin)
    archive.append(0, [to_batch(make_group(n), origin.schema()) for n in range(200)])
    archive.close()
    (folder / "config.yaml").write_text(dump(RunConfig()))
    write_place(folder, Place("unix:///nowhere/buffer.sock", origin.run_id))
    ledger = Ledger(200, 200, 0, 0, {}, 1200, 1200, 0, {}, policy_version=1)
    told = {"status": "completed", "wall_s": 1.0, "max_lag": 4.0, "seed": 0}
    write_summary(folder, summarize(RunRecords([], [], []), ledger=ledger, **told))  # type: ignore[arg-type]
    return folder


def in_a_process(
    run: Path, command: tuple[str, ...], stdout: int, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    name, *options = command
    target = run / "config.yaml" if name == "config" else run
    # Development mode tells of errors while the interpreter ends, too.
    python = [sys.executable, "-P", "-X", "dev", "-W", "ignore", "-m", "counterflow.cli"]
    return subprocess.run(
        [*python, name, str(target), *options], stdout=stdout, stderr=subprocess.PIPE, env=os.environ | environment
    )


def test_live_view_ends_a_run_whose_output_finds_no_room() -> None:
    script = (
        "from counterflow.display import Display; from counterflow.output import checked_output\n"
        "with checked_output(), Display(3) as display:\n    display.note('x' * 10**6)"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-P", "-c", script], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_full_disk_gives_a_traceback(run: Path, command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = in_a_process(run, command, full.fileno())
    assert (done.returncode, done.stderr.decode()) == (
        1,
        "counterflow: error: the output cannot be written (No space left on device): "
        "make room there, or send it elsewhere\n",
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_reader_that_has_gone_gives_a_traceback(run: Path, command: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = in_a_process(run, command, writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("command", [("ledger",), ("inspect",), ("report",)], ids=" ".join)
def test_output_that_cannot_say_all_letters(run: Path, command: tuple[str, ...]) -> None:
    strange = run.rename(run.parent / os.fsdecode(b"\xff\xc3\xbc"))
    done = in_a_process(strange, command, subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")


def no_folder(folder: Path) -> None:
    pass


def empty_folder(folder: Path) -> None:
    folder.mkdir()


def file(folder: Path) -> None:
    folder.touch()


@pytest.mark.parametrize("make", [no_folder, empty_folder, file])
def test_folder_that_is_no_run_is_shown_as_an_empty_one(
    tmp_path: Path, refused: Callable[..., str], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "other")
    said = {refused(command, tmp_path / "other") for command in ("ledger", "inspect", "report")}
    assert said == {
        f"counterflow: error: {tmp_path}/other is no run folder (no config.yaml there): "
        "name one that `counterflow run` made\n"
    }


def test_name_that_no_file_can_have(refused: Callable[..., str]) -> None:
    for command in ("ledger", "inspect", "report"):
        assert "cannot be read (File name too long): check the path" in refused(command, "x" * 5000)
