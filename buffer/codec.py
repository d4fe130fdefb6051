"""Groups to Arrow IPC and back: nothing changes on the way, and nothing that is not a group of the run gets through.

Token ids and log-probs of a decoded group are views of its payload, unless it is to be kept. Payloads are not trusted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from struct import unpack_from
from sys import intern
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from counterflow.buffer.trajectory import SCHEMA, SCHEMA_VERSION, BoolArray, Group, Origin, Trajectory, VersionSpan
from counterflow.errors import EntryError

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

_ROW, _NAMES = pa.struct(list(SCHEMA)), SCHEMA.names
_HIGHEST_TOKEN_ID = np.iinfo(np.int32).max
_LOWEST_LOGPROB = float(np.finfo(np.float32).min)
# A probability is at most 1, but its logarithm in float32 may be rounded up past 0.
_HIGHEST_LOGPROB = 1e-4


def encode(group: Group, schema: pa.Schema) -> memoryview:
    """Encode a group as one Arrow IPC stream. `schema` comes from `Origin.schema`."""
    parts = schema.serialize(), to_batch(group, schema).serialize(), END_OF_STREAM
    # Arrow's memory is used again; Python's, of this size, would be the system's anew each time.
    payload = pa.allocate_buffer(sum(map(len, parts)))
    with pa.FixedSizeBufferWriter(payload) as writer:
        for part in parts:
            writer.write(part)
    return memoryview(payload).cast("B")


def decode(payload: bytes | memoryview, origin: Origin, *, keep: bool = False) -> Group:
    """Decode what `encode` made: token ids and log-probs are views of the payload, or with `keep` copies.

    Raises:
        EntryError: the bytes are not one group of this schema version and origin, or its rows do not fit together.
    """
    return from_batch(read_batch(payload, origin), keep=keep)


def to_batch(group: Group, schema: pa.Schema) -> pa.RecordBatch:
    """The group as a record batch, one row a trajectory. `schema` comes from `Origin.schema`."""
    # One call for all columns: each call to Arrow costs more than what it does for a group.
    rows = [
        (
            group.group_id,
            group.admission,
            group.prompt_id,
            index,
            group.prompt_token_ids,
            t.response_token_ids,
            t.behavior_logprobs,
            [(span.version, span.start, span.end) for span in t.version_spans],
            t.loss_mask,
            t.reward,
            t.reward_parts,
            t.finish_reason,
            group.started_at_us,
            group.finished_at_us,
        )
        for index, t in enumerate(group.trajectories)
    ]
    batch = pa.RecordBatch.from_struct_array(pa.array(rows, _ROW))
    return batch.replace_schema_metadata(schema.metadata)


def read_batch(payload: bytes | memoryview, origin: Origin) -> pa.RecordBatch:
    """The record batch in a payload, its columns views of the payload.

    Raises:
        EntryError: the bytes are not exactly one valid record batch of this schema version and origin.
    """
    source = pa.BufferReader(payload)
    try:
        messages = pa.ipc.MessageReader.open_stream(source)
        schema = _schema(_next_message(messages, "schema").serialize().to_pybytes(), origin)
        message = _next_message(messages, "record batch")
        if _is_compressed(message.metadata):
            raise EntryError("the record batch is compressed; groups travel as they are")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        if next(messages, None) is not None:
            raise EntryError("something follows the record batch; an entry holds one group")
    except (pa.ArrowException, StopIteration, OSError, UnicodeDecodeError) as error:
        raise EntryError(f"not an Arrow group: {str(error) or type(error).__name__}") from error
    if source.tell() != len(payload):
        raise EntryError(f"the group ends at byte {source.tell()} of {len(payload)}")
    return batch


def from_batch(batch: pa.RecordBatch, *, keep: bool = False) -> Group:
    """The group in a record batch of `SCHEMA`, its token ids and log-probs views of the batch.

    Args:
        keep: copy them instead: a group that is kept long is smaller without its batch, which has the schema with it
            and the prompt in each row.

    Raises:
        EntryError: the rows do not fit together, or hold what no sampler makes; names the first such row.
    """
    count = batch.num_rows
    if count == 0:
        raise EntryError("the group has no trajectory")
    columns = dict(zip(_NAMES, batch.columns, strict=True))
    for name, column in columns.items():
        if column.null_count and not SCHEMA.field(name).nullable:
            raise EntryError(f"row {_first_null(column)}: {name} is null")
    for row, index in enumerate(columns["sample_index"].to_pylist()):
        if index != row:
            raise EntryError(f"row {row}: sample_index is {index}")

    prompts = _arrays(columns, "prompt_token_ids", 0, _HIGHEST_TOKEN_ID)
    responses = _arrays(columns, "response_token_ids", 0, _HIGHEST_TOKEN_ID, keep)
    logprobs = _arrays(columns, "behavior_logprobs", _LOWEST_LOGPROB, _HIGHEST_LOGPROB, keep)
    spans = _spans(columns["version_spans"])
    masks = _masks(columns["loss_mask"])
    rewards = columns["reward"].to_pylist()
    parts = columns["reward_parts"].to_pylist()
    reasons = [intern(reason) for reason in columns["finish_reason"].to_pylist()]
    trajectories = tuple(
        Trajectory(responses[i], logprobs[i], spans[i], rewards[i], reasons[i], dict(parts[i] or ()), masks[i])
        for i in range(count)
    )
    for row, trajectory in enumerate(trajectories):
        _check(row, trajectory)
    _shared("prompt_token_ids", [prompt.tobytes() for prompt in prompts])
    return Group(
        group_id=_shared("group_id", columns["group_id"].to_pylist()),
        admission=_shared("admission", columns["admission"].to_pylist()),
        prompt_id=_shared("prompt_id", columns["prompt_id"].to_pylist()),
        prompt_token_ids=prompts[0].copy() if keep else prompts[0],
        trajectories=trajectories,
        started_at_us=_shared("started_at", columns["started_at"].view(pa.int64()).to_pylist()),
        finished_at_us=_shared("finished_at", columns["finished_at"].view(pa.int64()).to_pylist()),
    )


@lru_cache(maxsize=4)
def _schema(message: bytes, origin: Origin) -> pa.Schema:
    """The schema in a message, checked; one object for all groups of a run."""
    schema = pa.ipc.read_schema(pa.BufferReader(message))
    _check_origin(schema, origin)
    return schema


def _check_origin(schema: pa.Schema, origin: Origin) -> None:
    metadata = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    if metadata.get("schema_version") != str(SCHEMA_VERSION):
        raise EntryError(f"schema version {metadata.get('schema_version')}, this reader knows {SCHEMA_VERSION}")
    if schema != SCHEMA:
        raise EntryError(f"the columns are not those of schema version {SCHEMA_VERSION}")
    for key in ("run_id", "model_fingerprint", "tokenizer_fingerprint"):
        if metadata.get(key) != getattr(origin, key):
            raise EntryError(f"{key} is {metadata.get(key)!r}, this run's is {getattr(origin, key)!r}")


def _next_message(messages: pa.ipc.MessageReader, kind: str) -> pa.Message:
    message = messages.read_next_message()
    # `read_schema` does not look, and a message of another kind is a segmentation fault.
    if message.type != kind:
        raise EntryError(f"a message of kind {message.type!r} where the {kind} should be")
    return message


def _is_compressed(metadata: pa.Buffer) -> bool:
    # Arrow would unpack 12 kB to 250 MB, and has no option against it. In its format (Message.fbs) field 2 of the root
    # table is the header, and field 3 of a record batch's header its compression; Arrow verified all offsets before.
    (root,) = unpack_from("<I", metadata)
    header = _flatbuffer_field(metadata, root, 2)
    (offset,) = unpack_from("<I", metadata, header)
    return _flatbuffer_field(metadata, header + offset, 3) > 0


def _flatbuffer_field(flatbuffer: pa.Buffer, table: int, index: int) -> int:
    """Where a field of a table begins; 0 where the table leaves it out."""
    (to_vtable,) = unpack_from("<i", flatbuffer, table)
    vtable, slot = table - to_vtable, 4 + 2 * index
    (size,) = unpack_from("<H", flatbuffer, vtable)
    (offset,) = unpack_from("<H", flatbuffer, vtable + slot) if slot < size else (0,)
    return table + offset if offset else 0


def _check(row: int, trajectory: Trajectory) -> None:
    tokens = len(trajectory.response_token_ids)
    if len(trajectory.behavior_logprobs) != tokens:
        raise EntryError(f"row {row}: {tokens} tokens but {len(trajectory.behavior_logprobs)} behaviour log-probs")
    if trajectory.loss_mask is not None and len(trajectory.loss_mask) != tokens:
        raise EntryError(f"row {row}: {tokens} tokens but a loss mask of {len(trajectory.loss_mask)}")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise EntryError(f"row {row}: the reward is {trajectory.reward}, not finite")
    for name, part in trajectory.reward_parts.items():
        if part is None or not math.isfinite(part):
            raise EntryError(f"row {row}: the reward part {name!r} is {part}, not finite")
    at, version = 0, 0
    for span in trajectory.version_spans:
        if span.start != at or span.end < span.start:
            raise EntryError(f"row {row}: version span {span} does not continue at token {at}")
        if span.version < version:
            raise EntryError(f"row {row}: version span {span} is older than version {version} before it")
        at, version = span.end, span.version
    if at != tokens:
        raise EntryError(f"row {row}: version spans end at token {at} of {tokens}")


def _shared(name: str, values: list[Any]) -> Any:
    """The value that every row of a group repeats."""
    for row, value in enumerate(values):
        if value != values[0]:
            raise EntryError(f"row {row}: {name} differs from row 0's")
    return values[0]


def _values(column: pa.ListArray) -> tuple[pa.Array, list[int]]:
    """The values of a list column, and the offsets [rows + 1] of its rows in them."""
    offsets = column.offsets.to_pylist()
    first, end = offsets[0], offsets[-1]
    return column.values.slice(first, end - first), [offset - first for offset in offsets]


def _refuse_nulls(name: str, values: pa.Array, offsets: list[int]) -> None:
    if values.null_count:
        raise EntryError(f"row {_row(offsets, _first_null(values))}: {name} holds a null")


def _arrays(
    columns: dict[str, pa.Array], name: str, lowest: float, highest: float, keep: bool = False
) -> list[npt.NDArray[Any]]:
    """The rows of a column of lists of numbers, as views, of a copy with `keep`; each lies in `[lowest, highest]`."""
    values, offsets = _values(columns[name])
    _refuse_nulls(name, values, offsets)
    flat = values.to_numpy()
    # `min` and `max` pass a NaN on, and it compares as false.
    if not (flat.min(initial=highest) >= lowest and flat.max(initial=lowest) <= highest):
        at = int(np.argmin((flat >= lowest) & (flat <= highest)))
        raise EntryError(f"row {_row(offsets, at)}: {name} holds {flat[at]}, not in [{lowest:g}, {highest:g}]")
    if keep:
        flat = flat.copy()
    return [flat[start:end] for start, end in pairwise(offsets)]


def _masks(column: pa.ListArray) -> list[BoolArray | None]:
    """The rows of the loss mask, unpacked from Arrow's one bit a token to numpy's one byte."""
    if column.null_count == len(column):
        return [None] * len(column)
    values, offsets = _values(column)
    _refuse_nulls("loss_mask", values, offsets)
    flat = values.to_numpy(zero_copy_only=False)
    present = column.is_valid().to_pylist()
    rows = [flat[start:end] for start, end in pairwise(offsets)]
    return [row if there else None for row, there in zip(rows, present, strict=True)]


def _spans(column: pa.ListArray) -> list[tuple[VersionSpan, ...]]:
    values, offsets = _values(column)
    fields = values.flatten()
    for numbers in fields:
        _refuse_nulls("version_spans", numbers, offsets)
    spans = tuple(map(VersionSpan, *(numbers.to_pylist() for numbers in fields)))
    return [spans[start:end] for start, end in pairwise(offsets)]


def _row(offsets: list[int], at: int) -> int:
    return bisect_right(offsets, at) - 1


def _first_null(column: pa.Array) -> int:
    return int(column.is_null().index(True).as_py())
