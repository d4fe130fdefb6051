"""Work that is done ahead, in a thread, while its owner is busy with something else.

Comes in: a look at what is there, repeated until it says that it is done. Nothing goes out: whatever goes wrong here
will go wrong again, and be told, when its owner does the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from counterflow.buffer.connection import CLIENT_ERRORS


class Ahead:
    """One thread at a time, which does not keep the process."""

    def __init__(self) -> None:
        self._going_on: tuple[threading.Thread, threading.Event] | None = None

    def begin(self, look: Callable[[], bool], every_s: float) -> None:
        """Look every so many seconds until `look` says True, or the server does not answer."""
        stop = threading.Event()

        def run() -> None:
            with suppress(*CLIENT_ERRORS):
                while not (look() or stop.wait(every_s)):
                    pass

        thread = threading.Thread(target=run, name="fetch ahead", daemon=True)
        self._going_on = thread, stop
        thread.start()

    def end(self) -> None:
        """Stop, and wait until the look that goes on is over."""
        if self._going_on is not None:
            thread, stop = self._going_on
            stop.set()
            thread.join()
            self._going_on = None
