"""The run's log: one JSON line for each thing that happened to a step, a version or a group, in `events.jsonl`."""

from __future__ import annotations

import json
import time
from pathlib import Path


class EventLog:
    """Appends events to the run folder; a line is written whole as it happens."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"

    def write(self, event: str, **fields: object) -> None:
        """Append one event with the numbers that say what it happened to."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
