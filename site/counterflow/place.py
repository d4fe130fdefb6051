"""Where a run keeps its groups: a word left in the run folder, for commands that come later."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from counterflow.errors import ConfigError

T = TypeVar("T")

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
    return read_json(folder / _FILE, lambda fields: Place(**fields))


def read_json(path: Path, of: Callable[[Any], T]) -> T | None:
    """What `of` makes of a file that a run left in its folder; None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): it was damaged, or is another program's") from error
