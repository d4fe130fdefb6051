"""A segment of the archive: one Arrow IPC stream, one record batch a step, each with a checksum of itself.

In: a step's groups, or the path of a segment. Out: the bytes to append, or the whole steps that are there. Any Arrow
reader opens a segment. Only reads files; who writes and cuts them is `archive.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from counterflow.buffer.codec import END_OF_STREAM
from counterflow.buffer.trajectory import SCHEMA, SCHEMA_VERSION, Origin, Passage
from counterflow.errors import ConfigError, EntryError, first_line

STEP_COLUMNS = (
    pa.field("learner_version", pa.int64(), nullable=False),
    pa.field("position", pa.int32(), nullable=False),
)
CONTINUATION = b"\xff\xff\xff\xff"
SEAL = b"counterflow crc32 "
UNSEALED = SEAL + b"????????"
"""What stands in a message's metadata while its checksum is computed."""
PASSAGES = b"passages"
"""Key in a message's metadata: added_at and taken_at of each of its groups, as JSON."""


@dataclass(frozen=True)
class ArchivedStep:
    """The groups of one optimizer step, in the order in which they were trained.

    `learner_version` is the learner's at the update: the step made `learner_version` + 1, and the lag of a token is
    `learner_version` minus the version of its span. `groups` have the columns of `SCHEMA` and the metadata of their
    origin, one row a trajectory.
    """

    learner_version: int
    groups: list[pa.RecordBatch]
    passages: list[Passage]
    """Each group's way through the buffer, for the parts of its lag; empty where that was not archived."""


@dataclass(frozen=True)
class StoredStep:
    """A step as it lies in a segment, its checksum found right; `end` is the offset behind it, in bytes."""

    path: Path
    schema: pa.Schema
    learner_version: int
    message: pa.ipc.Message
    end: int

    def read(self) -> ArchivedStep:
        """Decompress the step.

        Raises:
            ConfigError: it is not the step that the segment's name and its place in it promise.
        """
        try:
            with pa.ipc.open_stream(b"".join((self.schema.serialize(), self.message.serialize()))) as reader:
                step, metadata = reader.read_next_batch_with_custom_metadata()
            step.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"{self.path}: step {self.learner_version + 1} is no group ({first_line(error)}): "
                "restore the segment from a copy"
            ) from error
        versions, positions = step.column("learner_version").to_numpy(), step.column("position").to_numpy()
        if not len(versions) or (versions != self.learner_version).any():
            raise ConfigError(
                f"{self.path}: where learner_version {self.learner_version} should stand is another: "
                "give the segment its name back, the learner_version of its first row in 8 digits"
            )
        starts = np.flatnonzero(np.diff(positions, prepend=-1))
        rows = step.select(SCHEMA.names)
        groups = [rows.slice(at, end - at) for at, end in zip(starts, [*starts[1:], len(positions)], strict=True)]
        passages = [Passage(*pair) for pair in json.loads(metadata.get(PASSAGES, b"[]"))]
        return ArchivedStep(self.learner_version, groups, passages)


def segment_schema(origin: Origin) -> pa.Schema:
    """The columns of a segment: those of a group behind the step's, with the origin as metadata."""
    schema = origin.schema()
    return pa.schema([*STEP_COLUMNS, *schema], metadata=schema.metadata)


def encode_step(
    learner_version: int, batches: Sequence[pa.RecordBatch], schema: pa.Schema, passages: Sequence[Passage] = ()
) -> bytes:
    """The step as one message of a stream of `schema`, compressed and with its checksum.

    `passages` go into the message's metadata: the groups' columns are the same with and without them.

    Raises:
        EntryError: there is no group, or one of them has no row or other columns.
    """
    rows = [batch.num_rows for batch in batches]
    if not rows or 0 in rows:
        raise EntryError(f"step {learner_version + 1} cannot be archived: it has no group, or one without trajectories")
    group_columns = pa.schema(list(schema)[len(STEP_COLUMNS) :])
    if not all(batch.schema.equals(group_columns) for batch in batches):
        raise EntryError(f"step {learner_version + 1} cannot be archived: a group has other columns than the archive")
    joined = pa.concat_batches(batches)
    version = pa.array(np.full(joined.num_rows, learner_version, np.int64))
    position = pa.array(np.repeat(np.arange(len(rows), dtype=np.int32), rows))
    step = pa.RecordBatch.from_arrays([version, position, *joined.columns], schema=schema)
    told = json.dumps([(passage.added_at, passage.taken_at) for passage in passages])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(step, custom_metadata={PASSAGES: told, "seal": UNSEALED})
    stream = sink.getvalue()
    source = pa.BufferReader(stream)
    pa.ipc.read_message(source)
    start = source.tell()
    seal = _seal(pa.ipc.read_message(source))
    return stream[start : source.tell()].to_pybytes().replace(UNSEALED, seal, 1)  # type: ignore[no-any-return]


def segments(folder: Path) -> list[Path]:
    """The segments of an archive in order; files of other names are none."""
    named = [path for path in folder.iterdir() if re.fullmatch(r"\d{8,18}\.arrow", path.name)]
    return sorted((path for path in named if path == segment_path(folder, first_version(path))), key=first_version)


def segment_path(folder: Path, learner_version: int) -> Path:
    """Where the segment lies that begins with this step."""
    return folder / f"{learner_version:08d}.arrow"


def first_version(path: Path) -> int:
    """The learner_version of a segment's first step, from its name."""
    return int(path.stem)


def stored_steps(path: Path, *, last: bool) -> Iterator[StoredStep]:
    """The whole steps of a segment, one at a time. Only in the archive's last one may the end be missing or torn.

    Raises:
        ConfigError: the segment is none, of another schema version, or damaged.
        OSError: the disk refuses.
    """
    with pa.OSFile(os.fsencode(path)) as source:
        schema = _read_schema(path, source)
        learner_version = first_version(path)
        while True:
            start = source.tell()
            try:
                message = _read_sealed(source)
            except EOFError:
                at, size = source.tell(), source.size()
                if at == size and (at == start + len(END_OF_STREAM) or (last and at == start)):
                    return
                reason = "the end is missing" if at == size else "something lies behind the end"
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno:
                    raise
                reason = first_line(error)
            else:
                yield StoredStep(path, schema, learner_version, message, source.tell())
                learner_version += 1
                continue
            # A segment gets its name with its first step in it: only a later step can be torn.
            if last and learner_version > first_version(path) and _is_torn(path, start):
                return
            raise ConfigError(
                f"{path}: damaged at byte {start} ({reason}), not just cut short: restore it from a copy; "
                "the steps before this place, and those of other segments, can still be read (`inspect --step`)"
            )


def _read_schema(path: Path, source: pa.NativeFile) -> pa.Schema:
    try:
        schema = pa.ipc.read_schema(source)
    except (pa.ArrowException, EOFError, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise ConfigError(
            f"{path}: not a segment of an archive ({first_line(error)}): "
            "restore it from a copy; if the run did not write it, move it away"
        ) from error
    version = (schema.metadata or {}).get(b"schema_version", b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION) and re.fullmatch(r"\d{1,9}|none", version):
        raise ConfigError(
            f"{path}: groups of schema version {version}, this reader knows {SCHEMA_VERSION}: "
            "use the version of Counterflow that wrote it"
        )
    if version != str(SCHEMA_VERSION) or schema.remove_metadata() != pa.schema([*STEP_COLUMNS, *SCHEMA]):
        raise ConfigError(f"{path}: damaged in its columns: restore it from a copy")
    return schema


def _read_sealed(source: pa.NativeFile) -> pa.ipc.Message:
    message = pa.ipc.read_message(source)
    if message.type != "record batch" or _seal(message) not in message.metadata.to_pybytes():
        raise pa.ArrowInvalid("the checksum does not fit")
    return message


def _seal(message: pa.ipc.Message) -> bytes:
    metadata = re.sub(SEAL + rb"[0-9a-f]{8}", UNSEALED, message.metadata.to_pybytes(), count=1)
    return SEAL + b"%08x" % zlib.crc32(message.body, zlib.crc32(metadata))


def _is_torn(path: Path, start: int) -> bool:
    """Whether a write that was cut short explains what lies behind `start`: then nothing was written after it."""
    content = path.read_bytes()
    if content.endswith(END_OF_STREAM):
        return False
    at = start
    while (at := content.find(CONTINUATION, at + 1)) >= 0:
        with contextlib.suppress(pa.ArrowException, EOFError, OSError):
            _read_sealed(pa.BufferReader(pa.py_buffer(content)[at:]))
            return False
    return True
