"""A run that is resumed: its own configuration and id, when nothing of its former life is left.

A run folder flows in; out flow the configuration and what the run must be told beside it, or one clear error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from counterflow.buffer.trajectory import Origin
from counterflow.configs import as_data, load_config
from counterflow.configs.resumable import differing_keys
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, UnavailableError
from counterflow.learner.branch import missing_steps, reach
from counterflow.learner.checkpoint import checkpoint_path, chosen_version, read_manifest
from counterflow.locks import hold
from counterflow.place import read_config, read_place
from counterflow.summary import read_outcome

_DYING_S = 120.0


@dataclass(frozen=True)
class Resumption:
    """How a run is resumed."""

    run_id: str
    checkpoint: int | None
    """Version of the checkpoint to go on from, 0 for the model itself; None: the newest."""
    lose_branch: bool
    """Whether versions may be given up that cannot be made again."""


def resumed_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration that a run goes on with: its own, and what may be changed of it.

    Raises:
        ConfigError: no run is there, it is complete, or a key was overridden that changes what is trained.
    """
    before = read_config(folder)
    after = load_config(folder / "config.yaml", overrides)
    if keys := differing_keys(as_data(before), as_data(after)):
        raise ConfigError(
            f"override {', '.join(keys)}: a resumed run trains as it did before: leave it out, or begin a new run"
        )
    status, ledger = read_outcome(folder)
    if status == "completed" and ledger is not None and ledger.policy_version >= after.run.steps:
        raise ConfigError(
            f"{folder}: the run is complete, with {ledger.policy_version} steps: raise run.steps to go on"
        )
    folder = folder.resolve()
    return after.replacing("run", folder=folder.parent, name=folder.name, overwrite=False)


def resumption(folder: Path, checkpoint: int | None, lose_branch: bool) -> Resumption:
    """What the run must be told.

    Raises:
        ConfigError: the run had not begun.
    """
    place = read_place(folder)
    if place is None:
        raise ConfigError(
            f"{folder}: the run ended before it began to generate (no buffer.json there): start it with "
            "run.overwrite=true instead"
        )
    return Resumption(place.run_id, checkpoint, lose_branch)


def check_resumable(folder: Path, config: RunConfig, origin: Origin, resumption: Resumption) -> None:
    """See that what the run left is enough to go on from, and that nobody writes there any more.

    Raises:
        ConfigError: the checkpoint is of something else, or steps are missing that may not be given up.
        UnavailableError: a process of the run's former life does not end.
    """
    _wait_for_the_dead(folder)
    version = chosen_version(folder / "checkpoints", resumption.checkpoint)
    if version:
        read_manifest(checkpoint_path(folder / "checkpoints", version), origin, config)
    reached = reach(folder / "archive", version)
    if reached.trouble and not resumption.lose_branch:
        raise ConfigError(missing_steps(reached))


def _wait_for_the_dead(folder: Path) -> None:
    """Return when no process of the run's former life writes in its folder: some take a while to notice its end.

    Raises:
        UnavailableError: one still does.
    """
    deadline = time.monotonic() + _DYING_S
    for path in (folder / "archive" / ".lock", folder / "buffer" / ".lock"):
        while path.exists():
            if (lock := hold(path)) is not None:
                lock.close()
                break
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{path.parent}: a process of the run as it was before still writes there: end it, then resume"
                )
            time.sleep(0.2)
