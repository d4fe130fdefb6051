"""A group of trajectories, and the schema of its Arrow form: one record batch a group, one row a trajectory.

Groups flow from the actors through the stream to the learner. Data only; the way into Arrow and back is the codec's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA_VERSION = 1

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

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
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("reward", pa.float32()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("finished_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled by the weights of this policy version."""

    version: int
    start: int
    end: int


def spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """The version that sampled each token, as runs of equal ones."""
    found: list[VersionSpan] = []
    for version, run in groupby(versions):
        start = found[-1].end if found else 0
        found.append(VersionSpan(version, start, start + len(list(run))))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled response.

    `behavior_logprobs` [response] are natural logarithms of the distribution really sampled from (temperature
    included). `reward` is the task's own, never shaped; None where the reward function failed. `loss_mask` [response]
    is true where a token is trained; None trains every token.
    """

    response_token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_spans: tuple[VersionSpan, ...]
    reward: float | None
    finish_reason: str
    reward_parts: dict[str, float] = field(default_factory=dict)
    loss_mask: BoolArray | None = None


@dataclass(frozen=True, slots=True)
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

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version that sampled a token; None when there is no token."""
        return min(self._versions(), default=None)

    @property
    def newest_version(self) -> int | None:
        """The highest policy version that sampled a token; None when there is no token."""
        return max(self._versions(), default=None)

    def _versions(self) -> Iterator[int]:
        return (span.version for t in self.trajectories for span in t.version_spans if span.end > span.start)


@dataclass(frozen=True, slots=True)
class Passage:
    """A group's way through the buffer, in learner versions."""

    added_at: int
    """The learner's when the group was added, as far as the server knew it."""
    taken_at: int
    """The learner's when it first took the group; after a restart, when the new learner first did."""


@dataclass(frozen=True, slots=True)
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
