"""`summary.json`, read back: each key is there and of its type, or one line says which is not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from counterflow.place import read_json
from counterflow.records import Ledger

__all__ = ["Outcome", "Summary", "read_outcome", "read_summary"]


class _Written(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


if TYPE_CHECKING:
    _Ledger: TypeAlias = _Written
else:
    # A ledger in a file says all: what it leaves out is not 0.
    _Ledger = create_model("_Ledger", __base__=_Written, **{k: (v, ...) for k, v in get_type_hints(Ledger).items()})


class Outcome(_Written):
    """How a run ended, and where its groups were then."""

    status: str
    ledger: _Ledger | None


class _Heldout(_Written):
    successes: int
    n: int
    rate: float
    low: float
    high: float


class _Lag(_Written):
    mean: float | None
    p95: int | None
    max: int | None


class _Busy(_Written):
    learner: float | None
    actors: float | None


class Summary(Outcome):
    """All that `counterflow.recorder.summarize` says."""

    reason: str | None
    steps: int
    policy_version: int
    heldout_before: _Heldout | None
    heldout_after: _Heldout | None
    lag: _Lag
    tokens_generated: int
    tokens_trained: int
    wall_s: float
    busy: _Busy
    overlap: float | None
    max_lag: float | Literal["inf"] | None
    seed: int | None
    reward_failures: dict[str, int]


def read_outcome(folder: Path) -> tuple[str | None, Ledger | None]:
    """How the run in a folder ended and its last ledger; None for what it did not say.

    Raises:
        ConfigError: its summary cannot be read.
    """
    read = read_json(folder / "summary.json", Outcome)
    if read is None:
        return None, None
    return read.status, Ledger(**read.ledger.model_dump()) if read.ledger else None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The whole summary in a run folder; None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    read = read_json(folder / "summary.json", Summary, "delete it to see a report of the records alone")
    return read.model_dump() if read else None
