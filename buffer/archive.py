"""The archive: every group that the learner consumed, step by step, as Arrow segments in the folder `archive` of a run.

In: a step's record batches, before its commit. Out: the same batches with the version at which they were trained, for
replay and for people. Knows neither Redis nor torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import pyarrow as pa

from counterflow.buffer.codec import END_OF_STREAM
from counterflow.buffer.segment import (
    ArchivedStep,
    encode_step,
    first_version,
    segment_path,
    segment_schema,
    segments,
    stored_steps,
)
from counterflow.buffer.trajectory import Origin, Passage
from counterflow.errors import ConfigError, RunFailed, UnavailableError, first_line
from counterflow.locks import hold

__all__ = ["Archive", "ArchivedStep", "last_step", "read_steps"]


class Archive:
    """The learner's side: a step is on the disk before `append` returns.

    Opening cuts off a step that a killed process left unfinished. Until it is closed, no other can open the folder.

    Args:
        folder: where the segments lie; made if it is not there.
        origin: what all groups of the run share.
        segment_bytes: a segment that has reached this size is ended, and the next step begins another.

    Raises:
        UnavailableError: another process has the archive open, or the disk refuses.
        ConfigError: what lies there is of another run or version, or damaged.
    """

    def __init__(self, folder: Path, origin: Origin, *, segment_bytes: int = 64 << 20) -> None:
        self._folder, self._schema, self._segment_bytes = folder, segment_schema(origin), segment_bytes
        self._file: FileIO | None = None
        self._end = 0
        self._same_schema = False
        self._last_version: int | None = None
        with _disk(folder, "the archive cannot be opened"):
            folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(folder.parent)
            self._lock = _lock(folder)
            for unfinished in folder.glob(".*.arrow.tmp"):
                unfinished.unlink()
            self._reopen(None)

    @property
    def folder(self) -> Path:
        """Where the segments lie."""
        return self._folder

    @property
    def last_version(self) -> int | None:
        """`learner_version` of the last step; None while there is none."""
        return self._last_version

    def append(self, learner_version: int, batches: Sequence[pa.RecordBatch], passages: Sequence[Passage] = ()) -> None:
        """Keep the groups of the step that is taken at `learner_version`; they are on the disk on return.

        Args:
            learner_version: the last step's plus one; any, where the archive is empty.
            batches: one a group, in the order of training, as `to_batch` and `read_batch` give them.
            passages: each group's way through the buffer; none where it is not known.

        Raises:
            UnavailableError: the disk refuses; nothing of the step is kept, and it may be appended again.
            EntryError: a batch is not a group of this schema.
            RunFailed: the version does not follow the last one, or the archive is closed.
        """
        if self._lock.closed:
            raise RunFailed(f"{self._folder}: the archive is closed: open it again")
        if self._last_version is not None and learner_version != self._last_version + 1:
            raise RunFailed(
                f"{self._folder}: learner_version {learner_version} does not follow {self._last_version}, the last "
                "that is archived: truncate the archive to the version you go on from, or give the run a new folder"
            )
        message = encode_step(learner_version, batches, self._schema, passages)
        with _disk(self._folder, f"step {learner_version + 1} cannot be archived"):
            if self._file is None or not self._same_schema or self._end >= self._segment_bytes:
                self._begin_segment(learner_version, message)
            else:
                self._write(self._file, message)
                self._end += len(message)
        self._last_version = learner_version

    def truncate(self, after: int) -> None:
        """Drop the steps whose learner_version is above `after`, for good: on the disk on return.

        When it fails the archive is closed; to open it and truncate again is safe.

        Raises:
            UnavailableError: the disk refuses.
            ConfigError: a segment that stays is damaged.
        """
        if self._last_version is not None and after < self._last_version:
            with _disk(self._folder, f"the steps after learner_version {after} cannot be dropped"):
                self._reopen(after)

    def close(self) -> None:
        """End the last segment and let others open the archive. May be called twice; nothing can be appended after."""
        if self._file is not None:
            # Each step is on the disk already, and a stream without its end reads the same.
            with contextlib.suppress(OSError):
                self._write(self._file, END_OF_STREAM)
            self._file.close()
        self._lock.close()

    def _write(self, file: FileIO, content: bytes) -> None:
        """Put `content` behind the last whole step and on the disk, or leave nothing of it."""
        try:
            # What an earlier write left and could not take back goes first.
            file.truncate(self._end)
            file.seek(self._end)
            _write_through(file, content)
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(self._end)
                os.fsync(file.fileno())
            raise

    def _begin_segment(self, learner_version: int, message: bytes) -> None:
        path = segment_path(self._folder, learner_version)
        temporary = path.with_name(f".{path.name}.tmp")
        content = self._schema.serialize().to_pybytes() + message
        if self._file is not None:
            self._write(self._file, END_OF_STREAM)
        try:
            with FileIO(temporary, "w") as file:
                _write_through(file, content)
            temporary.replace(path)
            _sync_folder(self._folder)
            begun = FileIO(path, "r+")
        except OSError:
            for left in (temporary, path):
                with contextlib.suppress(OSError):
                    left.unlink()
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._end, self._same_schema = begun, len(content), True

    def _reopen(self, after: int | None) -> None:
        try:
            self._open_last(after)
        except BaseException:
            self.close()
            raise

    def _open_last(self, after: int | None) -> None:
        """Go on behind the last whole step, or behind `after` if given, and cut off what lies there."""
        remaining = segments(self._folder)
        while after is not None and remaining and first_version(remaining[-1]) > after:
            remaining.pop().unlink()
            _sync_folder(self._folder)
        if self._file is not None:
            self._file.close()
        self._file, self._last_version = None, None
        if not remaining:
            return
        path = remaining[-1]
        for stored in stored_steps(path, last=True):
            if after is not None and stored.learner_version > after:
                break
            newest = stored
        self._check_origin(path, newest.schema)
        self._last_version = newest.read().learner_version
        self._end, self._same_schema = newest.end, newest.schema.equals(self._schema, check_metadata=True)
        self._file = FileIO(path, "r+")
        self._write(self._file, b"")

    def _check_origin(self, path: Path, schema: pa.Schema) -> None:
        for key in (b"run_id", b"model_fingerprint", b"tokenizer_fingerprint"):
            there, ours = schema.metadata.get(key, b"").decode(), self._schema.metadata[key].decode()
            if there != ours:
                raise ConfigError(
                    f"{path}: its {key.decode()} is {there!r}, this run's is {ours!r}: "
                    "move the other run's archive away, or give this run a new folder"
                )


def read_steps(folder: Path, start: int = 0) -> Iterator[ArchivedStep]:
    """The steps of an archive from learner_version `start` on, read one at a time; it may be written meanwhile.

    Raises:
        ConfigError: there is no such folder, steps are missing between others, or a segment is damaged or of another
            schema version; the message names it.
    """
    if not folder.exists():
        raise ConfigError(f"{folder}: there is no such archive: check the path")
    try:
        paths = segments(folder)
    except OSError as error:
        raise _unreadable(folder, error) from error
    while len(paths) > 1 and first_version(paths[1]) <= start:
        paths.pop(0)
    expected = first_version(paths[0]) if paths else 0
    for path in paths:
        if first_version(path) != expected:
            raise ConfigError(
                f"{path}: the steps of learner_version {expected} to {first_version(path) - 1} before it are missing: "
                "restore their segment from a copy"
            )
        # Plain reads: what is compressed gains nothing from a mapping, and one that the writer cuts kills its reader.
        try:
            for stored in stored_steps(path, last=path == paths[-1]):
                expected = stored.learner_version + 1
                if stored.learner_version >= start:
                    yield stored.read()
        except OSError as error:
            raise _unreadable(path, error) from error


def last_step(folder: Path) -> int | None:
    """The last step that an archive holds whole; None where it holds none. Raises as `read_steps`."""
    paths = segments(folder)
    steps = read_steps(folder, start=first_version(paths[-1])) if paths else iter(())
    return max((step.learner_version + 1 for step in steps), default=None)


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({os.strerror(error.errno) if error.errno else first_line(error)}): "
        "see that this user may read it, or restore it from a copy"
    )


def _write_through(file: FileIO, content: bytes) -> None:
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError as error:
        error.filename = file.name
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> FileIO:
    file = hold(folder / ".lock")
    if file is None:
        raise UnavailableError(f"{folder}: another process writes this archive: end it, or give this run a new folder")
    return file


@contextlib.contextmanager
def _disk(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"{error.filename or folder}: {what} ({error.strerror or error}): "
            "see that its disk has room and lets this user write"
        ) from error
