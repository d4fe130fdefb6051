"""Where a run keeps its groups: a word left in the run folder, for commands that come later."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from counterflow.errors import ConfigError

_FILE = "buffer.json"


@dataclass(frozen=True)
class Place:
    """A server's URL, which holds no secret, and the run's id on it."""

    url: str
    run_id: str


def write_place(folder: Path, place: Place) -> None:
    """Leave the word in a run folder."""
    (folder / _FILE).write_text(json.dumps(asdict(place)) + "\n", encoding="utf-8")


def read_place(folder: Path) -> Place | None:
    """The word in a run folder; None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / _FILE
    try:
        return Place(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): it was damaged, or is another program's") from error
