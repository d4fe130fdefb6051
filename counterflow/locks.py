"""Files that one process at a time holds."""

from __future__ import annotations

import fcntl
from io import FileIO
from pathlib import Path

RUN = ".lock"
"""Held in a run's folder while the run goes on."""


def hold(path: Path) -> FileIO | None:
    """Hold a file, made if absent, until it is closed or this process ends; None while another process holds it.

    Where the file system knows no locks everyone gets it: whoever starts runs must see that there is one a folder.

    Raises:
        OSError: it cannot be opened.
    """
    file = FileIO(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass
    return file


def is_held(path: Path) -> bool:
    """Whether another process holds the file; never where there are no locks, or this user may not write."""
    if not path.exists():
        return False
    try:
        lock = hold(path)
    except OSError:
        # Another's folder: whoever may not write there cannot ask.
        return False
    if lock is None:
        return True
    lock.close()
    return False
