"""A lost branch: versions that were made after a checkpoint and cannot be made again, their groups being lost.

Where the archive is whole there is none. Where it is not, the learner goes on from the last version that can be made
again, under the number that follows the lost ones: so that the lag of no token is negative, whichever version sampled
it, and each is trained with its own log-prob. The archive begins anew; what was left of the old one is kept beside it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from counterflow.buffer.archive import last_step, read_steps
from counterflow.buffer.segment import first_version, segments
from counterflow.errors import ConfigError
from counterflow.place import read_json

BRANCHES = "branches.json"


@dataclass(frozen=True)
class Reach:
    """How far the archive brings a checkpoint."""

    version: int
    """The last one that can be made again."""
    known: int
    """The last one that the archive is known to have had."""
    trouble: str | None
    """Why it goes no further, where something is missing; None where the archive is whole."""


@dataclass(frozen=True)
class Branch:
    """A line of `branches.json`: versions `regained` + 1 to `lost_up_to` are lost, training goes on after them."""

    checkpoint: int
    regained: int
    lost_up_to: int
    archive: str
    """Folder, in the run's, of what was left of the old archive."""


def reach(archive: Path, checkpoint: int) -> Reach:
    """How far an archive brings the checkpoint of this version. Reads all steps after it."""
    version = known = checkpoint
    trouble = None
    if not archive.is_dir():
        return Reach(version, known, f"{archive} is not there" if checkpoint else None)
    if paths := segments(archive):
        known = max(known, first_version(paths[-1]) + 1)
    try:
        last = -1
        for step in read_steps(archive, start=checkpoint):
            last = step.learner_version
            if last != version:
                trouble = f"{archive} begins with the step of learner_version {last}: restore the segments before it"
                break
            version += 1
        if last < 0 and checkpoint and last_step(archive) != checkpoint:
            trouble = f"{archive} ends before version {checkpoint}, which is the checkpoint's: restore what is missing"
    except ConfigError as error:
        trouble = str(error)
    return Reach(version, max(known, version), trouble)


def settle(folder: Path, checkpoint: int, server_version: int, lose: bool) -> tuple[Reach, Branch | None]:
    """How far the archive of a run brings a checkpoint, and the branch that is given up where `lose` allows it.

    Args:
        server_version: the version that the buffer's server knows of.

    Raises:
        ConfigError: steps are missing, and `lose` is false.
    """
    reached = reach(folder / "archive", checkpoint)
    if reached.trouble is None and server_version > reached.version:
        # Only the end of an archive can be gone without a trace in it.
        ends = (
            f"{folder / 'archive'} ends with version {reached.version}, the buffer's server knows of {server_version}"
        )
        reached = replace(reached, trouble=f"{ends}: restore the archive's end from a copy")
    if reached.trouble and not lose:
        raise ConfigError(missing_steps(reached))
    if not reached.trouble:
        return reached, None
    return reached, _leave(folder, Branch(checkpoint, reached.version, max(reached.known, server_version), ""))


def missing_steps(reached: Reach) -> str:
    """What is wrong with an archive that does not reach far enough, and what to do."""
    return (
        f"{reached.trouble}; or resume with --lose-branch, which goes on with the weights of version {reached.version} "
        "and gives later ones up"
    )


def read_branches(folder: Path) -> list[Branch]:
    """The branches that a run has lost, in order.

    Raises:
        ConfigError: their record cannot be read.
    """
    return read_json(folder / BRANCHES, list[Branch]) or []


def _leave(folder: Path, branch: Branch) -> Branch:
    """Record the branch and move the archive aside."""
    branches = read_branches(folder)
    branch = replace(branch, archive=f"archive-lost-{len(branches) + 1}")
    temporary = folder / f".{BRANCHES}.tmp"
    temporary.write_text(json.dumps([asdict(b) for b in (*branches, branch)], indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / BRANCHES)
    if (folder / "archive").is_dir():
        (folder / "archive").rename(folder / branch.archive)
    return branch
