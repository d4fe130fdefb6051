"""A group of trajectories and its Arrow form: one record batch a group, one row a trajectory, Arrow IPC on the wire.

Groups flow from the actors through the stream to the learner; arrays of a decoded group are views of the entry's own
bytes. Nothing here knows Redis, torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from counterflow.errors import EntryError

SCHEMA_VERSION = 1

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("admission", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field(
            "version_spans",
            pa.list_(pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])),
            nullable=False,
        ),
        pa.field("reward", pa.float32()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("finished_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled by the weights of this policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Trajectory:
    """One sampled response.

    `behavior_logprobs` [response] are natural logarithms of the distribution really sampled from (temperature
    included). `reward` is the task's own, never shaped; None where the reward function failed.
    """

    response_token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_spans: tuple[VersionSpan, ...]
    reward: float | None
    finish_reason: str
    reward_parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt: the unit that is admitted, streamed, acknowledged and trained."""

    group_id: str
    admission: int
    prompt_id: int
    prompt_token_ids: Int32Array
    trajectories: tuple[Trajectory, ...]
    started_at_us: int
    finished_at_us: int

    @property
    def response_tokens(self) -> int:
        """Response tokens of all trajectories."""
        return sum(len(t.response_token_ids) for t in self.trajectories)


@dataclass(frozen=True)
class Origin:
    """What every group of a run shares: the metadata of its record batches, checked by the reader."""

    run_id: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    sampling: str

    def schema(self) -> pa.Schema:
        """The schema with this origin as its metadata. Build it once; it is reused for every group."""
        return SCHEMA.with_metadata(
            {
                "schema_version": str(SCHEMA_VERSION),
                "run_id": self.run_id,
                "model_fingerprint": self.model_fingerprint,
                "tokenizer_fingerprint": self.tokenizer_fingerprint,
                "sampling": self.sampling,
            }
        )


def encode(group: Group, schema: pa.Schema) -> bytes:
    """Encode a group as one Arrow IPC stream. `schema` comes from `Origin.schema`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(to_batch(group, schema))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def decode(payload: bytes, origin: Origin) -> Group:
    """Decode what `encode` made, without copying token ids and log-probs.

    Raises:
        EntryError: the bytes are not a group of this schema version and origin, or its lists do not fit together.
    """
    return from_batch(read_batch(payload, origin))


def to_batch(group: Group, schema: pa.Schema) -> pa.RecordBatch:
    """The group as a record batch, one row a trajectory. `schema` comes from `Origin.schema`."""
    rows = group.trajectories
    count = len(rows)
    spans = [len(t.version_spans) for t in rows]
    flat_spans = [s for t in rows for s in t.version_spans]
    columns = {
        "group_id": pa.array([group.group_id] * count, pa.string()),
        "admission": pa.array(np.full(count, group.admission, np.int64)),
        "prompt_id": pa.array(np.full(count, group.prompt_id, np.int64)),
        "sample_index": pa.array(np.arange(count, dtype=np.int32)),
        "prompt_token_ids": _lists([group.prompt_token_ids] * count, np.int32),
        "response_token_ids": _lists([t.response_token_ids for t in rows], np.int32),
        "behavior_logprobs": _lists([t.behavior_logprobs for t in rows], np.float32),
        "version_spans": pa.ListArray.from_arrays(
            _offsets(spans),
            pa.StructArray.from_arrays(
                [
                    pa.array(np.array([s.version for s in flat_spans], np.int64)),
                    pa.array(np.array([s.start for s in flat_spans], np.int32)),
                    pa.array(np.array([s.end for s in flat_spans], np.int32)),
                ],
                names=["version", "start", "end"],
            ),
        ),
        "reward": pa.array([t.reward for t in rows], pa.float32()),
        "reward_parts": pa.array([list(t.reward_parts.items()) for t in rows], SCHEMA.field("reward_parts").type),
        "finish_reason": pa.array([t.finish_reason for t in rows], pa.string()),
        "started_at": pa.array([group.started_at_us] * count, SCHEMA.field("started_at").type),
        "finished_at": pa.array([group.finished_at_us] * count, SCHEMA.field("finished_at").type),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def read_batch(payload: bytes, origin: Origin) -> pa.RecordBatch:
    """The record batch in a payload, its columns views of the payload.

    Raises:
        EntryError: the bytes are not a valid record batch of this schema version and origin.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            _check_metadata(reader.schema, origin)
            batch = reader.read_next_batch()
            batch.validate(full=True)
    except (pa.ArrowException, StopIteration, OSError, UnicodeDecodeError) as error:
        raise EntryError(f"not an Arrow group: {error or type(error).__name__}") from error
    return batch


def from_batch(batch: pa.RecordBatch) -> Group:
    """The group in a record batch of `SCHEMA`, its token ids and log-probs views of the batch.

    Raises:
        EntryError: the batch's lists do not fit together.
    """
    if batch.num_rows == 0:
        raise EntryError("the group has no trajectory")
    prompts = _arrays(batch.column("prompt_token_ids"))
    responses = _arrays(batch.column("response_token_ids"))
    logprobs = _arrays(batch.column("behavior_logprobs"))
    spans = batch.column("version_spans").to_pylist()
    rewards = batch.column("reward").to_pylist()
    parts = batch.column("reward_parts").to_pylist()
    reasons = batch.column("finish_reason").to_pylist()
    trajectories = tuple(
        Trajectory(
            response_token_ids=responses[i],
            behavior_logprobs=logprobs[i],
            version_spans=tuple(VersionSpan(**span) for span in spans[i]),
            reward=rewards[i],
            finish_reason=reasons[i],
            reward_parts=dict(parts[i] or []),
        )
        for i in range(batch.num_rows)
    )
    for index, trajectory in enumerate(trajectories):
        _check(index, trajectory)
    return Group(
        group_id=batch.column("group_id")[0].as_py(),
        admission=batch.column("admission")[0].as_py(),
        prompt_id=batch.column("prompt_id")[0].as_py(),
        prompt_token_ids=prompts[0],
        trajectories=trajectories,
        started_at_us=batch.column("started_at")[0].value,
        finished_at_us=batch.column("finished_at")[0].value,
    )


def _check_metadata(schema: pa.Schema, origin: Origin) -> None:
    metadata = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    if metadata.get("schema_version") != str(SCHEMA_VERSION) or schema.remove_metadata() != SCHEMA:
        raise EntryError(f"schema version {metadata.get('schema_version')}, this reader knows {SCHEMA_VERSION}")
    for key in ("run_id", "model_fingerprint", "tokenizer_fingerprint"):
        if metadata.get(key) != getattr(origin, key):
            raise EntryError(f"{key} is {metadata.get(key)!r}, this run's is {getattr(origin, key)!r}")


def _check(index: int, trajectory: Trajectory) -> None:
    tokens = len(trajectory.response_token_ids)
    if len(trajectory.behavior_logprobs) != tokens:
        raise EntryError(f"row {index}: {tokens} tokens but {len(trajectory.behavior_logprobs)} behaviour log-probs")
    if not np.isfinite(trajectory.behavior_logprobs).all():
        raise EntryError(f"row {index}: a behaviour log-prob is not finite")
    if trajectory.reward is not None and not np.isfinite(trajectory.reward):
        raise EntryError(f"row {index}: the reward is not finite")
    at = 0
    for span in trajectory.version_spans:
        if span.start != at or span.end < span.start or span.version < 0:
            raise EntryError(f"row {index}: version span {span} does not continue at token {at}")
        at = span.end
    if at != tokens:
        raise EntryError(f"row {index}: version spans end at token {at} of {tokens}")


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def _lists(arrays: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> pa.ListArray:
    values = np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)
    return pa.ListArray.from_arrays(_offsets([len(a) for a in arrays]), pa.array(values))


def _arrays(column: pa.ListArray) -> list[npt.NDArray[Any]]:
    values = column.values
    if values.null_count or column.null_count:
        raise EntryError("a token list holds nulls")
    flat = values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    return [flat[offsets[i] : offsets[i + 1]] for i in range(len(column))]
