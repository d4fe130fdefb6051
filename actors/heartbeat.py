"""An engine's heartbeat: it is asked again and again whether it is at work, since one that hangs dies of nothing.

In: an engine. Out: what it died of, to whoever asks.
"""

from __future__ import annotations

import asyncio

from counterflow.actors.generation import Engine
from counterflow.errors import ProcessDied

_BEAT_S = 1.0


class Heartbeat:
    """Listens to an engine, until `stop`.

    Args:
        timeout_s: the longest silence. While the engine loads weights, which has a deadline of its own, it is no sign.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._task = asyncio.create_task(self._listen())

    def check(self) -> None:
        """See that the engine lives.

        Raises:
            ProcessDied: a process of it ended, or hangs.
        """
        self._engine.check()
        if self._task.done():
            self._task.result()

    def stop(self) -> None:
        """Listen no more."""
        self._task.cancel()

    async def _listen(self) -> None:
        while True:
            version, pulse = self._engine.version, asyncio.ensure_future(self._engine.pulse())
            try:
                answered, _ = await asyncio.wait([pulse], timeout=self._timeout_s)
                if answered:
                    pulse.result()
            finally:
                pulse.cancel()
            if not answered and self._engine.serving and self._engine.version == version:
                break
            await asyncio.sleep(_BEAT_S)
        raise ProcessDied(f"the engine hangs: it said nothing for {self._timeout_s:g} s (actors.heartbeat_timeout_s)")
