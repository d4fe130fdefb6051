"""Where each actor of a run is placed: the run's first ones in its own group, those that join later each by itself.

Numbers of actors flow in, places on the cluster flow out. Lives in the supervisor's loop.
"""

from __future__ import annotations

from counterflow.cluster import Bundle, Cluster
from counterflow.configs.schema import RunConfig


class Room:
    """The actors' places.

    Args:
        host: the address of the node that all actors must be on, where weights go nowhere else.
    """

    def __init__(self, cluster: Cluster, config: RunConfig, host: str | None) -> None:
        self._cluster, self._config, self._host = cluster, config, host
        self._added: dict[int, int] = {}

    def bundle(self, actor: int) -> Bundle:
        """What the actor needs of a node."""
        return Bundle(f"actor {actor}", self._config.actors.cpus, self._config.actors.gpus)

    async def place(self, actor: int) -> int:
        """The actor's place, which a process that died in it leaves to the next.

        Raises:
            PlacementError: there is none, told within `run.placement_timeout_s` seconds.
        """
        if actor < self._config.actors.count:
            # The learner's comes first.
            return actor + 1
        if actor not in self._added:
            timeout_s = self._config.run.placement_timeout_s
            self._added[actor] = await self._cluster.extend(self.bundle(actor), timeout_s, self._host)
        return self._added[actor]

    def give_back(self, actor: int) -> None:
        """Let go of the place of an actor that joined later; the others' stay the run's, for whoever joins next."""
        if (place := self._added.pop(actor, None)) is not None:
            self._cluster.give_back(place)
