"""Which groups may start, how stale they may become, and the stream that keeps them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from counterflow.configs.section import PositiveSeconds, Section


class AdmissionSection(Section):
    """Which groups may start, and how stale they may become."""

    groups_per_step: int = Field(32, ge=1, description="B: groups trained by one optimizer step.")
    samples_per_group: int = Field(8, ge=2, description="G: responses sampled for one prompt; a baseline needs two.")
    max_lag: float = Field(
        4,
        ge=0,
        description="Most versions that a token may be behind when it is trained. Group n may start only when "
        "floor(n/B) <= version + max_lag. 0 is synchronous, `inf` unbounded.",
    )
    staleness: Literal["wait", "drop", "mask_tokens", "withhold_keep_baseline", "downweight"] = Field(
        "wait",
        description="What keeps tokens past max_lag from the gradient. `wait`: groups start no earlier. When read: "
        "`drop` the group; `mask_tokens` past it alone; `withhold_keep_baseline`, the whole response, its reward "
        "staying in the group's baseline; `downweight` each token by `decay` for every version past it.",
    )
    run_ahead: float | None = Field(
        None,
        ge=0,
        description="Versions that admission may run ahead, in the place of max_lag, where staleness is not `wait`: "
        "group n may start when floor(n/B) <= version + run_ahead. Absent: max_lag.",
    )
    decay: float = Field(
        0.5, ge=0, lt=1, description="`downweight`: factor on a token's gradient a version past max_lag."
    )
    lease_s: PositiveSeconds = Field(
        300.0,
        description="A group not back so many seconds after its admission, or whose actor died, is given out again.",
    )
    attempts: int = Field(3, ge=1, description="How often a group is tried before it is dropped as poison.")

    @property
    def versions_ahead(self) -> float:
        """The bound of admission, which is that of consumption unless the one was given apart."""
        return self.max_lag if self.run_ahead is None else self.run_ahead

    @field_validator("max_lag", "run_ahead")
    @classmethod
    def whole_lag(cls, value: float | None) -> float | None:
        if value is not None and value != float("inf") and value != int(value):
            raise ValueError("it counts versions: a whole number, or inf")
        return value


class BufferSection(Section):
    """The stream of trajectories."""

    url: str | None = Field(
        None,
        description="Redis 7+ or Valkey 8+ URL, without a password. Absent: a server embedded in the run. "
        "User and password come from COUNTERFLOW_REDIS_USERNAME and COUNTERFLOW_REDIS_PASSWORD (or "
        "COUNTERFLOW_REDIS_PASSWORD_FILE), certificates from COUNTERFLOW_REDIS_{CA,CERT,KEY}_FILE.",
    )
    capacity_groups: int = Field(
        4096, ge=1, description="Groups, those being generated included, at which admission pauses."
    )
    capacity_bytes: int = Field(
        4 << 30, ge=1, description="Bytes of groups, those being generated estimated, at which admission pauses."
    )
    order: Literal["admission", "ready", "freshest"] = Field(
        "admission",
        description="Which groups make a batch: the next by `admission` number, those that are `ready` first, or those "
        "with the `freshest` tokens. The last two let groups overtake others, which may become stale: see "
        "admission.staleness; under `wait` they are dropped.",
    )
    uses: int = Field(1, ge=1, description="Steps that train each group; each use counts its own lag.")
    drop_equal_rewards: bool = Field(
        False, description="Drop groups whose task rewards are all equal; other groups are generated in their place."
    )
    connect_timeout_s: PositiveSeconds = Field(5.0, description="Longest wait, in seconds, for the server to answer.")
    outage_timeout_s: PositiveSeconds = Field(
        30.0, description="Longest wait, in seconds, for a server that went away, or is full, to come back."
    )
    archive_segment_bytes: int = Field(
        64 << 20, ge=1 << 10, description="Size, in bytes, at which the archive of trained groups begins a new segment."
    )
