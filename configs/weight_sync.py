"""The way of the weights back to the actors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from counterflow.configs.section import PositiveSeconds, Section


class WeightSyncSection(Section):
    """The way of the weights back to the actors."""

    transport: Literal["auto", "shared_memory", "gloo", "nccl", "disk"] = Field(
        "auto",
        description="How weights travel: `shared_memory` on one host, broadcast by `gloo` or, between GPUs, `nccl`, "
        "or files on a `disk` that all hosts see. `auto`: nccl where learner and actors have GPUs, else shared memory "
        "where all are on one host, else gloo.",
    )
    in_flight: Literal["keep", "wait", "abort"] = Field(
        "keep",
        description="What an update does to responses that are being sampled: `keep` goes on with them under the new "
        "weights, `wait` lets them end first, `abort` samples them again from the start (of their turn).",
    )
    recompute: bool = Field(
        True,
        description="Whether kept responses recompute their key-value cache under the new weights; else they attend to "
        "what older weights made. New responses never do.",
    )
    timeout_s: PositiveSeconds = Field(
        120.0,
        le=86_400,
        description="The most, in seconds, that each call of an update may take: to stage, prepare, send, load or "
        "serve a version. Each part of a broadcast has a third of it.",
    )
    bucket_bytes: int = Field(
        64 << 20, ge=1 << 10, description="The most that a broadcast sends at once; two such buckets are held."
    )
    host: str | None = Field(
        None,
        min_length=1,
        description="Address at which actors on other hosts reach the learner. Absent: loopback on one host, else the "
        "learner's address on Ray.",
    )
    canary_every: int = Field(
        25,
        ge=0,
        description="Versions between two comparisons of every engine's log-probs with the learner's at the same "
        "version; 0 leaves them out.",
    )
    canary_prompts: int = Field(4, ge=1, description="Held-out prompts that each engine answers for a comparison.")
    canary_limit: float = Field(
        0.2, gt=0, description="Mean difference of the two, in nats a token, at which the run stops."
    )
    folder: Path | None = Field(
        None,
        description="Where `disk` writes versions: a folder that all hosts see. Absent: `weights` in the run folder.",
    )

    @field_validator("host")
    @classmethod
    def one_address(cls, host: str | None) -> str | None:
        if host in ("0.0.0.0", "::"):
            raise ValueError(f"{host} is every address of a host: name one at which actors reach the learner")
        return host

    @property
    def caches_are_recomputed(self) -> bool:
        """Whether no token attends to key-value cache of older weights than its own."""
        # Where requests are not kept, no cache is of use.
        return self.recompute or self.in_flight != "keep"
