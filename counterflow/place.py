"""What a run leaves in its folder for commands that come later, read back and checked: where its groups are, say."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from counterflow.errors import ConfigError, first_line

if TYPE_CHECKING:
    from counterflow.configs import RunConfig

T = TypeVar("T")

_FILE = "buffer.json"
_RESTORE = "restore it from a copy"


@dataclass(frozen=True)
class Place:
    """A server's URL, which holds no secret, and the run's id on it."""

    url: str
    run_id: str


def check_run_folder(folder: Path) -> None:
    """See that a run was made in this folder.

    Raises:
        ConfigError: it was not.
    """
    try:
        made = (folder / "config.yaml").is_file()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}): check the path") from error
    if not made:
        raise ConfigError(f"{folder} is no run folder (no config.yaml there): name one that `counterflow run` made")


def read_config(folder: Path) -> RunConfig:
    """The configuration that a run wrote into its folder.

    Raises:
        ConfigError: there is none, it was damaged, or another version wrote it.
    """
    from counterflow.configs import load_config

    check_run_folder(folder)
    try:
        return load_config(folder / "config.yaml")
    except ConfigError as error:
        raise ConfigError(
            f"{first_line(error)}: the run's own configuration was damaged, or is another version's: {_RESTORE}"
        ) from error


def write_place(folder: Path, place: Place) -> None:
    """Leave the word in a run folder."""
    (folder / _FILE).write_text(json.dumps(asdict(place)) + "\n", encoding="utf-8")


def read_place(folder: Path) -> Place | None:
    """The word in a run folder; None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    from counterflow.buffer.connection import is_url

    path = folder / _FILE
    place = read_json(path, Place)
    if place is not None and not is_url(place.url):
        raise ConfigError(f"{path} cannot be read (url: it is no redis://, rediss:// or unix:// URL): {_RESTORE}")
    return place


def read_json(path: Path, kind: type[T], mend: str = _RESTORE) -> T | None:
    """A file that a run left in its folder as a dataclass or model; None where there is none.

    Args:
        mend: what to do about a file that is damaged.

    Raises:
        ConfigError: it cannot be read.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    raise ConfigError(f"{path} cannot be read ({reason}): {mend}")
