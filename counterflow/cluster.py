"""The run's place on Ray: a cluster of its own or one that is there, with room for every process of the run."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from counterflow import processes
from counterflow.configs.schema import RunConfig
from counterflow.errors import PlacementError, UnavailableError

_OBJECT_STORE_BYTES = 128 << 20
_PORTS = range(20_000, 31_000)
"""Below those that systems give out unasked."""
_PORTS_EACH = 8


@dataclass(frozen=True)
class Bundle:
    """What one process of the run needs of a node."""

    owner: str
    cpus: int
    gpus: int

    def __str__(self) -> str:
        gpus = f" and {self.gpus} GPU" if self.gpus else ""
        return f"{self.owner} ({self.cpus} CPU{gpus})"


@dataclass(frozen=True)
class Node:
    """What a node has to give."""

    cpus: float
    gpus: float


def process_environment(cpus: int, gpus: int) -> dict[str, str]:
    """The environment of a process of the run: threads as many as cores, nothing from a model hub, quiet."""
    # On CPUs vLLM would compile two sampling kernels with g++ for 14 s, to no measurable gain.
    without_compiler = {} if gpus else {"TORCH_COMPILE_DISABLE": "1"}
    return without_compiler | {
        processes.WATCH_PARENT_VARIABLE: "1",
        "OMP_NUM_THREADS": str(cpus),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def bundles(config: RunConfig) -> list[Bundle]:
    """The learner first, then the actors, then the learner's other ranks."""
    actor, learner = config.actors, config.learner
    return [
        Bundle("learner", learner.cpus, learner.gpus),
        *(Bundle(f"actor {i}", actor.cpus, actor.gpus) for i in range(actor.count)),
        *(Bundle(f"learner rank {i}", learner.cpus, learner.gpus) for i in range(1, learner.ranks)),
    ]


def check_room(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> None:
    """See that every bundle fits on a node, first come first served.

    Raises:
        PlacementError: names the first bundle that has no room.
    """
    if (index := _without_room(wanted, nodes)) is not None:
        cpus, gpus = sum(n.cpus for n in nodes), sum(n.gpus for n in nodes)
        placed = ", ".join(map(str, wanted[:index])) or "nothing"
        raise PlacementError(
            f"no room for bundle {index}, {wanted[index]}: there are {cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} "
            f"node(s), taken by {placed}; lower actors.count, actors.cpus, learner.ranks or learner.cpus, or add nodes"
        )


def _without_room(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> int | None:
    free = list(nodes)
    for index, bundle in enumerate(wanted):
        fits = [i for i, n in enumerate(free) if n.cpus >= bundle.cpus and n.gpus >= bundle.gpus]
        if not fits:
            return index
        # What needs no GPU goes where there are fewest.
        fit = min(fits, key=lambda i: free[i].gpus)
        free[fit] = Node(free[fit].cpus - bundle.cpus, free[fit].gpus - bundle.gpus)
    return None


class Cluster:
    """A connection to Ray with a reserved place for each bundle, and for others later. Made by `connect`.

    Args:
        group: of as many bundles.
        cores: of this machine, for the run alone; None leaves the choice to the system.
    """

    def __init__(self, group: Any, wanted: Sequence[Bundle], cores: Sequence[int] | None) -> None:
        self._places = {index: (group, index) for index in range(len(wanted))}
        self._numbers = itertools.count(len(wanted))
        self._first_port = random.choice(_PORTS)
        shares = processes.share_cores([bundle.cpus for bundle in wanted], cores) if cores else None
        self._cores = dict(enumerate(shares)) if shares else None
        self._free_cores = [core for core in cores or () if not any(core in share for share in shares or ())]

    def hosts(self) -> list[str]:
        """The address of each bundle's node."""
        import ray

        group, _ = self._places[0]
        nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        return [addresses[nodes[index]] for index in sorted(nodes)]

    def cores(self, index: int) -> list[int] | None:
        """The cores of the bundle's process; None leaves the choice to the system."""
        return self._cores.get(index) if self._cores else None

    async def extend(self, bundle: Bundle, timeout_s: float, host: str | None) -> int:
        """Reserve a place for one bundle more; returns its index.

        Args:
            host: the address of the node that it must be on.

        Raises:
            PlacementError: there is no room.
        """
        resources = {f"node:{host}": 0.001} if host else {}
        index = next(self._numbers)
        self._places[index] = await asyncio.to_thread(_place, [bundle], timeout_s, resources), 0
        if self._cores is not None:
            self._cores[index], self._free_cores = self._free_cores[: bundle.cpus], self._free_cores[bundle.cpus :]
        return index

    def give_back(self, index: int) -> None:
        """Let go of a place that `extend` reserved, when its process has ended."""
        import ray

        group, _ = self._places.pop(index)
        ray.util.remove_placement_group(group)
        if self._cores is not None:
            self._free_cores += self._cores.pop(index)

    def ports(self, index: int) -> dict[str, str]:
        """Where the process of the bundle looks for free ports, as its environment says it.

        vLLM lets go of a port that it found free before it takes it: engines that start together look in ranges of
        their own, and those of another run, which begin anywhere, hardly ever in the same.
        """
        return {"VLLM_PORT": str(self._first_port + _PORTS_EACH * index)}

    def spawn(self, cls: type, bundle: Bundle, index: int, *args: Any, beside: str | None = None) -> Any:
        """Make a Ray actor of `cls(*args)` in the place reserved for bundle `index`.

        Args:
            beside: a group of calls, named so by `.options(concurrency_group=...)`, that run one after the other in a
                thread of their own, beside the rest.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, position = self._places[index]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=position)
        remote = ray.remote(concurrency_groups={beside: 1})(cls) if beside else ray.remote(cls)
        options = remote.options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": process_environment(bundle.cpus, bundle.gpus) | self.ports(index)},
        )
        return options.remote(*args)


@contextmanager
def connect(config: RunConfig) -> Iterator[Cluster]:
    """Start or join Ray, reserve room for the run, and leave nothing behind.

    Raises:
        UnavailableError: no Ray cluster answers at `run.ray_address`.
        PlacementError: no room, told within `run.placement_timeout_s` seconds.
    """
    wanted, local = bundles(config), config.run.ray_address == "local"
    cores = processes.usable_cores()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would run its workers at niceness 15: any other program of the user would starve the run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    before = processes.descendants()
    where = "a new one here" if local else f"run.ray_address {config.run.ray_address!r}"
    started_here = {"num_cpus": len(cores), "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        try:
            ray.init(
                address=config.run.ray_address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(started_here if local else {}),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            token = "" if local else " (one that asks for a token finds it in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
            raise UnavailableError(f"no Ray cluster at {where}: {error}{token}") from error
        group = _reserve(wanted, config.run.placement_timeout_s)
        yield Cluster(group, wanted, cores if local and config.run.pin_cores else None)
        ray.util.remove_placement_group(group)
    finally:
        with processes.interrupts_blocked():
            ours = processes.descendants() - before
            ray.shutdown()
            # Ray ends its own processes; what those had started (engines, reward workers) may outlive them.
            processes.end(ours, grace_s=1.0)


def _reserve(wanted: Sequence[Bundle], timeout_s: float) -> Any:
    import ray

    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    check_room(wanted, [Node(n.get("CPU", 0), n.get("GPU", 0)) for n in nodes])
    return _place(wanted, timeout_s)


def _place(wanted: Sequence[Bundle], timeout_s: float, resources: Mapping[str, float] | None = None) -> Any:
    """A placement group of these bundles, each with these resources beside its own."""
    import ray

    group = ray.util.placement_group(
        [{"CPU": b.cpus, **({"GPU": b.gpus} if b.gpus else {}), **(resources or {})} for b in wanted]
    )
    if not group.wait(timeout_s):
        available = ray.available_resources()
        ray.util.remove_placement_group(group)
        free = Node(available.get("CPU", 0), available.get("GPU", 0))
        if (index := _without_room(wanted, [free])) is not None:
            raise PlacementError(
                f"no room for {wanted[index]}: {free.cpus:g} CPUs and {free.gpus:g} GPUs of the cluster are free, the "
                "rest is this run's or others'; add nodes, or ask for less"
            )
        where = f" on {', '.join(resources)}" if resources else ""
        raise PlacementError(
            f"Ray placed none of {', '.join(map(str, wanted))}{where} within {timeout_s:g} s, with {free.cpus:g} CPUs "
            f"and {free.gpus:g} GPUs free: see `ray status`"
        )
    return group
