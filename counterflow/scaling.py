"""How many actors a living run is to have: asked for from outside, through a word in its folder, and what came of it.

`counterflow scale` writes the word; the supervisor reads it, has the fleet follow, and writes how far that is. A folder
is all that both surely share: the word needs no server, no password and no port, and it outlives a learner begun again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterflow.errors import ConfigError, DeadlineExceeded
from counterflow.locks import RUN, is_held
from counterflow.place import check_run_folder, read_json

if TYPE_CHECKING:
    from counterflow.configs.schema import RunConfig
    from counterflow.fleet import Fleet
    from counterflow.telemetry import Telemetry

_WISH, _STANDING = "actors.json", "fleet.json"
_LOOK_AGAIN_S = 0.5
_MOST_ACTORS = 1_000
"""More is a slip of the hand, and each would wait for a place."""
_MEND = "ask again with `counterflow scale`"


@dataclass(frozen=True)
class Wish:
    """So many actors."""

    actors: int
    name: str
    """Of this wish alone: two may ask for the same."""


@dataclass(frozen=True)
class FleetStanding:
    """What the supervisor makes of the latest wish."""

    answers: str
    """The wish's name; empty before the first."""
    wanted: int
    """Actors that the fleet is to have; fewer than were asked for where some had no room."""
    serving: int
    """Those that generate; others are starting, or leaving."""


def ask(folder: Path, actors: int, timeout_s: float) -> FleetStanding:
    """Ask the run in `folder` for so many actors; returns what it makes of that, before new ones have started.

    Raises:
        ConfigError: no run is going on there, so many cannot be, or another asks at the same time.
        DeadlineExceeded: its supervisor does not take the word.
    """
    check_run_folder(folder)
    if actors < 1:
        raise ConfigError(f"--actors {actors}: a run needs one actor at least; to end it, press Ctrl-C where it runs")
    if actors > _MOST_ACTORS:
        raise ConfigError(f"--actors {actors}: ask for {_MOST_ACTORS:,} at most")
    wish, deadline = Wish(actors, secrets.token_hex(8)), time.monotonic() + timeout_s
    _refuse_ended(folder, actors)
    _write(folder / _WISH, wish)
    while (standing := read_json(folder / _STANDING, FleetStanding)) is None or standing.answers != wish.name:
        _refuse_ended(folder, actors)
        if read_json(folder / _WISH, Wish, _MEND) != wish:
            raise ConfigError(f"{folder}: another `counterflow scale` asked at the same time, and its word counts")
        if time.monotonic() > deadline:
            raise DeadlineExceeded("counterflow scale", f"the run in {folder} to take the word", timeout_s)
        time.sleep(_LOOK_AGAIN_S / 5)
    return standing


def _refuse_ended(folder: Path, actors: int) -> None:
    if not is_held(folder / RUN):
        raise ConfigError(
            f"{folder}: no run is going on there; to go on with one that ended: `counterflow run --resume {folder} "
            f"actors.count={actors}`"
        )


def as_it_was(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with as many actors as the fleet had room for; the latest wish is heard again."""
    standing = read_json(folder / _STANDING, FleetStanding)
    if standing is None:
        return config
    # Of those that were to join nobody knows whether there is room.
    placed = min(standing.wanted, max(standing.serving, config.actors.count))
    return config.replacing("actors", count=placed)


def forget(folder: Path) -> None:
    """Remove what a former life of the run left."""
    for name in (_WISH, _STANDING):
        (folder / name).unlink(missing_ok=True)


async def follow(folder: Path, fleet: Fleet, telemetry: Telemetry) -> None:
    """Have the fleet follow the word, for as long as the run lives."""
    answers, written = "", None
    while True:
        wish = _heard(folder, telemetry)
        if wish is not None and wish.name != answers:
            telemetry.event("fleet_scaled", before=fleet.wanted, wanted=wish.actors)
            telemetry.note(f"asked for {wish.actors} actor(s), there were to be {fleet.wanted}")
            fleet.resize(wish.actors)
            answers = wish.name
        standing = FleetStanding(answers, fleet.wanted, len(fleet.serving))
        if standing != written:
            _write(folder / _STANDING, standing)
            written = standing
        await asyncio.sleep(_LOOK_AGAIN_S)


def _heard(folder: Path, telemetry: Telemetry) -> Wish | None:
    """The latest wish; one that cannot be read is told of and removed."""
    try:
        wish = read_json(folder / _WISH, Wish, _MEND)
        if wish is None or 1 <= wish.actors <= _MOST_ACTORS:
            return wish
        reason = f"{folder / _WISH} asks for {wish.actors} actors: {_MEND}"
    except ConfigError as error:
        reason = str(error)
    telemetry.note(reason)
    (folder / _WISH).unlink(missing_ok=True)
    return None


def _write(path: Path, word: Wish | FleetStanding) -> None:
    # Two may write at once.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(asdict(word)) + "\n", encoding="utf-8")
    temporary.replace(path)
