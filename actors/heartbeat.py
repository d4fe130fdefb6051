"""An engine's heartbeat: it is asked again and again whether it is at work, since one that hangs dies of nothing.

In: an engine. Out: what it died of, to whoever asks.
"""

from __future__ import annotations

import asyncio

from counterflow.actors.generation import Engine
from counterflow.errors import ProcessDied
from counterflow.processes import descendants, end

_BEAT_S = 1.0
_GRACE_S = 1.0


class Heartbeat:
    """Listens to the engine of this process, until `stop`. One that hangs is killed, with all below this process.

    Args:
        timeout_s: the longest silence. While the engine loads weights, which has a deadline of its own, it is no sign.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._timeout_s, self._silent = engine, timeout_s, False
        self._task = asyncio.create_task(self._listen())

    async def check(self) -> None:
        """See that the engine lives.

        Raises:
            ProcessDied: a process of it ended, or hung and has been killed.
        """
        if self._silent or self._task.done():
            await self._task
        self._engine.check()

    def stop(self) -> None:
        """Listen no more."""
        self._task.cancel()

    async def _listen(self) -> None:
        while not self._silent:
            version, pulse = self._engine.version, asyncio.ensure_future(self._engine.pulse())
            try:
                answered, _ = await asyncio.wait([pulse], timeout=self._timeout_s)
                if answered:
                    pulse.result()
            finally:
                pulse.cancel()
            self._silent = not answered and self._engine.serving and self._engine.version == version
            if not self._silent:
                await asyncio.sleep(_BEAT_S)
        # What a dead actor leaves stopped or stuck would outlive the run.
        await asyncio.to_thread(end, descendants(), _GRACE_S)
        raise ProcessDied(
            f"the engine hangs: it said nothing for {self._timeout_s:g} s (actors.heartbeat_timeout_s) and was killed"
        )
