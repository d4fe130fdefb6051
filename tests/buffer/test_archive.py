"""The archive on a real disk: what `append` returned for is there after any death, in order, and nothing else is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from groups import make_group

from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import encode, from_batch, read_batch, to_batch
from counterflow.buffer.trajectory import SCHEMA, Group, Origin
from counterflow.errors import ConfigError, CounterflowError, EntryError, RunFailed, UnavailableError

GROUPS = 3


@cache
def step_of(version: int, origin: Origin) -> list[pa.RecordBatch]:
    groups = (make_group(version * GROUPS + i, samples=2 + i, version=version) for i in range(GROUPS))
    return [to_batch(group, origin.schema()) for group in groups]


def fill(folder: Path, origin: Origin, steps: int, *, start: int = 0, segment_bytes: int = 64 << 20) -> None:
    with closing(Archive(folder, origin, segment_bytes=segment_bytes)) as archive:
        for version in range(start, start + steps):
            archive.append(version, step_of(version, origin))


def versions(folder: Path, origin: Origin) -> list[int]:
    """The steps that are read back, each compared with what was written."""
    found = []
    for step in read_steps(folder):
        assert step.groups == step_of(step.learner_version, origin)
        found.append(step.learner_version)
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.arrow"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "archive"


WRITER = """
archive = Archive(folder, origin, segment_bytes=20_000)
version = -1 if archive.last_version is None else archive.last_version
print(version, flush=True)
while True:
    version += 1
    archive.append(version, step_of(version, origin))
    print(version, flush=True)
"""

FULL_DISK = """
import resource, signal
archive = Archive(folder, origin, segment_bytes=segment_bytes)
for version in range(2):
    archive.append(version, step_of(version, origin))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
room = 1000 + (0 if segment_bytes < 5000 else (folder / "00000000.arrow").stat().st_size)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
for _ in range(3):
    try:
        archive.append(2, step_of(2, origin))
        raise SystemExit("the disk was not full")
    except UnavailableError as error:
        print(error)
    assert archive.last_version == 1 and versions(folder, origin) == [0, 1]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
archive.append(2, step_of(2, origin))
assert versions(folder, origin) == [0, 1, 2]
"""


def start(script: str, folder: Path, origin: Origin, segment_bytes: int = 64 << 20) -> subprocess.Popen[str]:
    """A process of its own that runs the script."""
    preamble = f"""
import sys
from pathlib import Path
sys.path += {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
from test_archive import *
folder, origin, segment_bytes = Path({str(folder)!r}), {origin!r}, {segment_bytes}
"""
    command = [sys.executable, "-c", preamble + script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_groups_change_on_their_way_through_the_archive(folder: Path, origin: Origin) -> None:
    failed = make_group(1)
    trajectories = [
        replace(failed.trajectories[0], reward=None),
        replace(failed.trajectories[1], reward_parts={"a": 1}),
    ]
    sent = [make_group(0, samples=3, tokens=5), replace(failed, trajectories=tuple(trajectories)), make_group(2, 1, 0)]
    with closing(Archive(folder, origin)) as archive:
        archive.append(7, [read_batch(encode(group, origin.schema()), origin) for group in sent])
    (step,) = read_steps(folder)
    assert step.learner_version == 7
    assert [batch.schema.equals(origin.schema(), check_metadata=True) for batch in step.groups] == [True] * 3
    for batch, group in zip(step.groups, sent, strict=True):
        assert same(from_batch(batch), group)


def same(a: Group, b: Group) -> bool:
    schema = Origin("", "", "", "").schema()
    return bool(to_batch(a, schema) == to_batch(b, schema))


def test_order_is_lost_where_one_segment_ends_and_the_next_begins(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 11, segment_bytes=5_000)
    assert len(names(folder)) > 3 and names(folder)[0] == "00000000.arrow"
    assert versions(folder, origin) == list(range(11))
    for name in names(folder):
        with pa.ipc.open_stream(folder / name) as reader:
            table = reader.read_all()
        assert table.column("learner_version")[0].as_py() == int(name[:8])
        assert table.column_names == ["learner_version", "position", *SCHEMA.names]


def test_reader_that_wants_a_late_step_reads_all_before(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 11, segment_bytes=5_000)
    (folder / names(folder)[0]).write_bytes(b"damaged")
    assert [step.learner_version for step in read_steps(folder, start=8)] == [8, 9, 10]
    assert list(read_steps(folder, start=11)) == []


def test_closed_archive_does_not_go_on(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 2)
    fill(folder, origin, 2, start=2)
    with closing(Archive(folder, origin)) as archive:
        assert archive.last_version == 3
    assert (versions(folder, origin), len(names(folder))) == ([0, 1, 2, 3], 1)


def test_reader_waits_for_the_writer_or_stumbles_over_it(folder: Path, origin: Origin) -> None:
    with closing(Archive(folder, origin, segment_bytes=5_000)) as archive:
        assert archive.last_version is None and list(read_steps(folder)) == []
        for version in range(9):
            archive.append(version, step_of(version, origin))
            assert versions(folder, origin) == list(range(version + 1))


def test_writer_killed_at_any_moment_loses_a_step_or_leaves_a_torn_one(folder: Path, origin: Origin) -> None:
    there, chance = -1, random.Random(0)
    for _ in range(20):
        with start(WRITER, folder, origin) as process:
            assert process.stdout is not None
            printed = [int(process.stdout.readline()) for _ in range(chance.randint(1, 5))]
            assert printed[0] == there
            time.sleep(chance.uniform(0.0, 0.01))
            process.kill()
            printed += [int(line) for line in process.stdout if line.endswith("\n")]
        found = versions(folder, origin)
        assert found in (list(range(printed[-1] + 1)), list(range(printed[-1] + 2)))
        there = len(found) - 1
    assert there >= 20 and len(names(folder)) > 2
    fill(folder, origin, 1, start=there + 1)
    assert versions(folder, origin) == list(range(there + 2))


def test_tail_cut_at_any_byte_is_read_or_stops_the_next_writer(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 2)
    path = folder / "00000000.arrow"
    whole = path.read_bytes()
    with closing(Archive(folder, origin)) as archive:
        archive.truncate(0)
    for size in range(path.stat().st_size - 8, len(whole) + 1):
        path.write_bytes(whole[:size])
        expected = [0] if size < len(whole) - 8 else [0, 1]
        assert [step.learner_version for step in read_steps(folder, start=1)] == expected[1:], size
        if size % 50 == 0:
            assert versions(folder, origin) == expected
            fill(folder, origin, 1, start=len(expected))
            assert versions(folder, origin) == [*expected, len(expected)]


def test_tail_that_power_loss_left_as_zeros_is_a_step(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 2)
    path = folder / "00000000.arrow"
    whole = path.read_bytes()[:-8]
    with closing(Archive(folder, origin)) as archive:
        archive.truncate(0)
    one = len(path.read_bytes()) - 8
    for torn in (bytes(len(whole) - one), whole[one : one + 2000] + bytes(len(whole) - one - 2000), bytes(8), bytes(3)):
        path.write_bytes(whole[:one] + torn)
        assert versions(folder, origin) == [0]
        fill(folder, origin, 1, start=1)
        assert versions(folder, origin) == [0, 1]


def test_flipped_byte_is_read_as_data_or_has_whole_steps_cut_off(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 3)
    path = folder / "00000000.arrow"
    whole = path.read_bytes()
    schema_bytes = pa.ipc.open_stream(path).schema.serialize().size
    for at in random.Random(0).sample(range(schema_bytes, len(whole) - 8), 400):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match=r"00000000\.arrow: damaged at byte"):
            versions(folder, origin)
        with pytest.raises(ConfigError, match=r"00000000\.arrow: damaged at byte"):
            Archive(folder, origin)
        assert path.stat().st_size == len(whole)


@pytest.mark.parametrize("at", [3000, 6000])
def test_damage_before_whole_steps_passes_for_a_torn_tail(folder: Path, origin: Origin, at: int) -> None:
    with closing(Archive(folder, origin)) as archive:
        for version in range(4):
            archive.append(version, step_of(version, origin))
        path = folder / "00000000.arrow"
        whole = path.read_bytes()
        for damaged in (whole[:at] + bytes(100) + whole[at + 100 :], whole[:at] + bytes(1) + whole[at:]):
            path.write_bytes(damaged)
            with pytest.raises(ConfigError, match=r"00000000\.arrow: damaged at byte \d+ .*restore it from a copy"):
                versions(folder, origin)
        path.write_bytes(whole)


def test_old_segment_cut_short_or_lost_goes_unnoticed(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 9, segment_bytes=5_000)
    middle = folder / names(folder)[1]
    whole = middle.read_bytes()
    for size in (len(whole) - 8, len(whole) - 9, len(whole) // 2, 100, 0):
        middle.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=middle.name):
            versions(folder, origin)
    middle.unlink()
    with pytest.raises(ConfigError, match=rf"{names(folder)[1]}: the steps of learner_version .* are missing"):
        versions(folder, origin)


def test_segment_under_another_name_is_read_as_other_steps(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 2)
    (folder / "00000000.arrow").rename(folder / "00000005.arrow")
    with pytest.raises(ConfigError, match=r"00000005\.arrow: where learner_version 5 should stand is another"):
        versions(folder, origin)
    with pytest.raises(ConfigError, match=r"00000005\.arrow"):
        Archive(folder, origin)


@pytest.mark.parametrize("after", [-1, 0, 3, 4, 8, 9])
def test_dropped_steps_come_back(folder: Path, origin: Origin, after: int) -> None:
    fill(folder, origin, 9, segment_bytes=5_000)
    left = list(range(min(after, 8) + 1))
    with closing(Archive(folder, origin, segment_bytes=5_000)) as archive:
        archive.truncate(after)
        assert archive.last_version == (left[-1] if left else None)
        assert versions(folder, origin) == left
        archive.append(len(left), step_of(len(left), origin))
    with closing(Archive(folder, origin)) as archive:
        assert archive.last_version == len(left)
    assert versions(folder, origin) == [*left, len(left)]


def test_step_is_archived_twice_or_left_out(folder: Path, origin: Origin) -> None:
    with closing(Archive(folder, origin)) as archive:
        archive.append(5, step_of(5, origin))
        for version in (5, 7, 0):
            with pytest.raises(RunFailed, match=f"learner_version {version} does not follow 5"):
                archive.append(version, step_of(version, origin))
    assert versions(folder, origin) == [5]


def test_step_without_groups_or_of_other_columns_is_archived(folder: Path, origin: Origin) -> None:
    batch = step_of(0, origin)[0]
    with closing(Archive(folder, origin)) as archive:
        for batches in ([], [batch, batch.slice(0, 0)], [batch, batch.drop_columns(["reward"])]):
            with pytest.raises(EntryError, match="step 1 cannot be archived"):
                archive.append(0, batches)
        assert archive.last_version is None
    assert names(folder) == []


@pytest.mark.parametrize("segment_bytes", [64 << 20, 2000])
def test_full_disk_leaves_half_a_step(folder: Path, origin: Origin, segment_bytes: int) -> None:
    with start(FULL_DISK, folder, origin, segment_bytes) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count("\n") == 3
    for line in out.splitlines():
        assert str(folder) in line and ".arrow: step 3 cannot be archived (File too large): see that its disk" in line


def test_folder_that_cannot_be_written_crashes_the_learner(tmp_path: Path, origin: Origin) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"file/archive: the archive cannot be opened \(Not a directory\)"):
        Archive(tmp_path / "file" / "archive", origin)


def test_two_learners_write_one_archive(folder: Path, origin: Origin) -> None:
    with closing(Archive(folder, origin)) as archive:
        with start(WRITER, folder, origin) as process:
            assert "another process writes this archive: end it" in process.communicate(timeout=60)[1]
        with pytest.raises(UnavailableError, match="another process writes this archive"):
            Archive(folder, origin)
    with pytest.raises(RunFailed, match="the archive is closed"):
        archive.append(0, step_of(0, origin))
    fill(folder, origin, 1)


def test_archive_of_another_run_or_version_is_continued(
    folder: Path, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder, origin, 2)
    for field in ("run_id", "model_fingerprint", "tokenizer_fingerprint"):
        with pytest.raises(ConfigError, match=rf"00000000\.arrow: its {field} is .*move the other run's archive away"):
            Archive(folder, replace(origin, **{field: "another"}))
    assert versions(folder, origin) == [0, 1]
    monkeypatch.setattr("counterflow.buffer.segment.SCHEMA_VERSION", 99)
    with pytest.raises(ConfigError, match="this reader knows 99: use the version of Counterflow that wrote it"):
        list(read_steps(folder))


def test_run_resumed_with_other_sampling_says_the_old_one_of_new_groups(folder: Path, origin: Origin) -> None:
    fill(folder, origin, 2)
    fill(folder, replace(origin, sampling='{"temperature": 2}'), 1, start=2)
    assert names(folder) == ["00000000.arrow", "00000002.arrow"]
    told = [step.groups[0].schema.metadata[b"sampling"] for step in read_steps(folder)]
    assert told == [b"{}", b"{}", b'{"temperature": 2}']


def test_foreign_files_in_the_folder_are_read_cut_or_removed(folder: Path, origin: Origin) -> None:
    folder.mkdir(parents=True)
    foreign = [".DS_Store", "notes.txt", "7.arrow", "00000001.parquet", "000000001.arrow", "00000001.arrow.bak"]
    for name in foreign:
        (folder / name).write_text("not ours")
    (folder / "00000000.arrow.d").mkdir()
    fill(folder, origin, 3)
    assert versions(folder, origin) == [0, 1, 2]
    with closing(Archive(folder, origin)) as archive:
        archive.truncate(-1)
    assert [(folder / name).read_text() for name in foreign] == ["not ours"] * len(foreign)
    for content in (b"", b"not ours", os.urandom(500)):
        (folder / "00000009.arrow").write_bytes(content)
        with pytest.raises(ConfigError, match=r"00000009\.arrow: not a segment of an archive .*move it away"):
            list(read_steps(folder))
        with pytest.raises(ConfigError, match=r"00000009\.arrow"):
            Archive(folder, origin)
        assert (folder / "00000009.arrow").read_bytes() == content


def test_no_folder_is_an_empty_archive(tmp_path: Path) -> None:
    with pytest.raises(CounterflowError, match="there is no such archive: check the path"):
        next(read_steps(tmp_path / "none"))


def test_archive_takes_as_much_room_as_the_stream(folder: Path, origin: Origin) -> None:
    random_numbers = np.random.default_rng(0)
    group = make_group(0, samples=8, tokens=512)
    words = [(random_numbers.zipf(1.3, 512) % 50_000).astype(np.int32) for _ in group.trajectories]
    logprobs = [-random_numbers.exponential(0.5, 512).astype(np.float32) for _ in group.trajectories]
    trajectories = [
        replace(t, response_token_ids=ids, behavior_logprobs=values)
        for t, ids, values in zip(group.trajectories, words, logprobs, strict=True)
    ]
    batch = to_batch(replace(group, trajectories=tuple(trajectories)), origin.schema())
    with closing(Archive(folder, origin)) as archive:
        archive.append(0, [batch] * 32)
    assert (folder / "00000000.arrow").stat().st_size < 0.75 * 32 * batch.nbytes
