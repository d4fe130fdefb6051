"""A run, built and supervised: the server, Ray, the actors and the learner, from the first check to the report.

The supervisor drives the learner step by step, has each version delivered to the actors, and watches them all;
trajectories flow past it, through the buffer.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from counterflow import preflight, scaling
from counterflow.actors.rollout import RolloutActor
from counterflow.actors.tasks import TaskSet
from counterflow.buffer.connection import Address, discover
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import expire_leases, finish, forget, read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.calls import as_failure, call
from counterflow.checks import Checks
from counterflow.cluster import Cluster, bundles, connect
from counterflow.configs.schema import RunConfig
from counterflow.display import Display
from counterflow.drops import DropWatch
from counterflow.errors import (
    BufferUnavailable,
    DeadlineExceeded,
    LearnerDied,
    RunFailed,
    first_line,
)
from counterflow.fleet import Fleet
from counterflow.learner.learner import Learner, StepResult
from counterflow.learner.objective_choice import check_objective
from counterflow.learner.ranks import Follower
from counterflow.learner_life import catch_up, named
from counterflow.metrics import Metrics
from counterflow.place import Place, write_place
from counterflow.port import WEIGHTS, LearnerPort
from counterflow.processes import descendants, shared_memory, terminate_like_interrupt
from counterflow.records import Ledger
from counterflow.resume import Resumption, check_resumable
from counterflow.room import Room
from counterflow.telemetry import Telemetry
from counterflow.weight_sync.delivery import Delivery
from counterflow.weight_sync.transports import BROADCASTS, settle

_WATCH_S = 1.0
_FLUSH_TICKS = 10
_ANSWER_TIMEOUT_S = 60.0
_FAREWELL_S = 1.0


def run(config: RunConfig, resumption: Resumption | None = None) -> Path:
    """Run to the end; returns the report's path. A learner that dies is begun again, with all that hangs on it.

    Args:
        resumption: how a run is resumed that its folder holds already; None: it is a new one.

    Raises:
        ConfigError, UnavailableError: before anything of the run was made.
        RunFailed, DeadlineExceeded, WeightSyncError: the run died; its folder says what it did until then.
        KeyboardInterrupt: interrupted; all processes have ended and the run folder is readable.
    """
    config = preflight.resolve(config)
    origin, task, warnings = preflight.check(config, resumption.run_id if resumption else None)
    if resumption:
        check_resumable(preflight.run_folder(config), config, origin, resumption)
    with ExitStack() as stack:
        stack.enter_context(terminate_like_interrupt())
        if config.buffer.url:
            # Last of all, when no actor lives that might add to it.
            stack.callback(_forget, Address(config.buffer.url, timeout_s=1.0, outage_s=0.0), origin)
        metrics = Metrics(config.metrics, max_lag=config.admission.max_lag)
        stack.callback(metrics.close)
        display = stack.enter_context(Display(config.run.steps))
        display.note(f"starting Ray; metrics at {metrics.url}")
        telemetry: Telemetry | None = None
        try:
            for restart in itertools.count(1):
                with connect(config) as cluster, terminate_like_interrupt():
                    if telemetry is None:
                        folder = (preflight.reopen_run_folder if resumption else preflight.make_run_folder)(config)
                        scaling.forget(folder)
                        stack.enter_context(preflight.holding(folder))
                        telemetry = Telemetry(config, folder, metrics, display)
                        for line in [*check_objective(config).lines, *(f"warning: {warning}" for warning in warnings)]:
                            telemetry.note(line)
                    try:
                        asyncio.run(Run(config, origin, task, folder, telemetry, resumption).supervise(cluster))
                        break
                    except LearnerDied as error:
                        if restart > config.learner.max_restarts:
                            raise RunFailed(f"{error}, after {restart - 1} restarts (learner.max_restarts)") from error
                        telemetry.event("learner_lost", restart=restart, error=first_line(error))
                        telemetry.note(
                            f"{first_line(error)}: the run goes on from its newest checkpoint (restart {restart} of "
                            f"{config.learner.max_restarts})"
                        )
                        resumption = None
                        config = scaling.as_it_was(config, folder)
        except (KeyboardInterrupt, Exception) as error:
            # What the run died of matters more than a report that cannot be written.
            with suppress(Exception):
                if telemetry is not None and isinstance(error, KeyboardInterrupt):
                    telemetry.note(f"stopped; report: {telemetry.finish('interrupted', 'stopped by the user')}")
                elif telemetry is not None:
                    telemetry.note(f"failed; report: {telemetry.finish('failed', str(error))}")
            raise
        assert telemetry is not None
        return telemetry.finish("completed", None)


class Run:
    """One run: its processes and its records."""

    def __init__(
        self,
        config: RunConfig,
        origin: Origin,
        task: TaskSet,
        folder: Path,
        telemetry: Telemetry,
        resumption: Resumption | None = None,
    ) -> None:
        self.config, self.origin, self.task, self.folder = config, origin, task, folder
        self.telemetry, self.resumption = telemetry, resumption
        self.server: EmbeddedServer | None = None
        self.delivery: Delivery
        self.fleet: Fleet
        self.checks: Checks
        self._evaluating: asyncio.Task[None] | None = None
        admission, buffer = config.admission, config.buffer
        ahead = min((admission.versions_ahead + 1) * admission.groups_per_step, buffer.capacity_groups)
        may_drop = admission.staleness == "drop"
        self._drops = DropWatch(admission.groups_per_step, config.run.step_timeout_s, int(ahead) if may_drop else 0)

    async def supervise(self, cluster: Cluster) -> None:
        """Build the run on the cluster, train, and say good-bye to every process.

        Raises:
            RunFailed, DeadlineExceeded, WeightSyncError: something died or hung.
            ConfigError: the model cannot be loaded.
        """
        self.telemetry.note(f"run {self.config.run.name} in {self.folder}")
        self.telemetry.event("run_started", run_id=self.origin.run_id)
        with ExitStack() as stack:
            address = self._buffer(stack)
            write_place(self.folder, Place(address.url, self.origin.run_id))
            self._spawn(cluster, address)
            try:
                await self._live(address)
            except* Exception as group:
                raise await named(self.learner, as_failure(group)) from None
            finally:
                await self._farewell(address)

    def _buffer(self, stack: ExitStack) -> Address:
        buffer = self.config.buffer
        if buffer.url:
            return discover(Address(buffer.url, buffer.connect_timeout_s, buffer.outage_timeout_s))
        self.server = stack.enter_context(EmbeddedServer(self.folder / "buffer", buffer.connect_timeout_s * 2))
        return replace(self.server.address, outage_s=buffer.outage_timeout_s)

    def _spawn(self, cluster: Cluster, address: Address) -> None:
        """Make the learner; the actors are made by the fleet, with a configuration that says how weights travel."""
        hosts = cluster.hosts()
        config = settle(self.config, one_host=len(set(hosts)) == 1, learner_host=hosts[0])
        self.telemetry.note(f"weights travel by {config.weight_sync.transport} (weight_sync.transport)")
        places = bundles(config)
        common = (config, address, self.origin, self.telemetry.started_at)
        asked = (self.resumption.checkpoint, self.resumption.lose_branch) if self.resumption else ()

        def follower(rank: int) -> Any:
            place = config.actors.count + rank
            return cluster.spawn(Follower, places[place], place, config, rank, cluster.cores(place))

        followers = [follower(rank) for rank in range(1, config.learner.ranks)]
        learner = (0, self.folder.resolve(), *common, cluster.cores(0), followers, *asked)
        self.learner = cluster.spawn(Learner, places[0], *learner, beside=WEIGHTS)

        room = Room(cluster, config, hosts[0] if config.weight_sync.transport == "shared_memory" else None)

        def actor(i: int, place: int) -> Any:
            arguments = (i, self.task, *common, cluster.cores(place))
            return cluster.spawn(RolloutActor, room.bundle(i), place, *arguments)

        port = LearnerPort(self.learner, self.telemetry, config.weight_sync.timeout_s)
        self.delivery = Delivery(port, config.weight_sync.transport in BROADCASTS, self.telemetry.retried)
        expire = partial(expire_leases, address, self.origin.run_id)
        self.fleet = Fleet(config, room, actor, self.delivery, expire, self.telemetry)
        self.checks = Checks(config, self.learner, self.fleet, self.delivery, self.telemetry)

    async def _live(self, address: Address) -> None:
        """Start, then train under watch until the last step is taken."""
        version = await self._start()
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._watch(address)),
                tasks.create_task(self._keep_server_alive()),
                tasks.create_task(scaling.follow(self.folder, self.fleet, self.telemetry)),
            ]
            await self._train(tasks, version)
            await asyncio.to_thread(finish, address, self.origin.run_id)
            for watch in watches:
                watch.cancel()
        self.telemetry.actors(await self.fleet.states())

    async def _start(self) -> int:
        """Start learner and actors; returns the version that they go on from, which every actor serves then."""
        self.telemetry.note(f"starting the learner and {self.config.actors.count} actor(s): their engines take a while")
        layout = await call(
            self.learner.layout.remote(), "the learner to load its model", self.config.run.start_timeout_s
        )
        standing = await catch_up(self.learner, self.config, self.telemetry)
        if standing.lost is not None:
            await self._checkpoint(standing.version)
        if standing.version:
            await self.delivery.publish()
            await self.delivery.arrived()
        await self.fleet.start(layout)
        return standing.version

    async def _checkpoint(self, version: int) -> None:
        # A checkpoint holds no version that the records on the disk do not have.
        self.telemetry.flush()
        reason = f"the learner to copy version {version} for its checkpoint"
        await call(self.learner.checkpoint.remote(), reason, self.config.run.step_timeout_s)

    async def _train(self, tasks: asyncio.TaskGroup, version: int) -> None:
        """The run itself: evaluate, then step, publish and now and then evaluate, then evaluate again."""
        run, every, delivery = self.config.run, self.config.evaluation.every, self.delivery
        if not (evaluated := self.telemetry.evaluated):
            await self.checks.evaluate(version)
        await self.checks.compare(version)
        await self.fleet.begin()
        self.telemetry.generating()
        if every and 0 < version < run.steps and version % every == 0 and version not in evaluated:
            # The run died before it was evaluated.
            await self._evaluate_beside(version, tasks)
        for step in range(version + 1, run.steps + 1):
            result = await self._step(step)
            await delivery.publish()
            self.telemetry.step(result.record, served=delivery.served, skipped=delivery.skipped)
            self.telemetry.intervals(result.intervals)
            self.telemetry.remarks(result.notes)
            if self.config.checkpoint.every and step % self.config.checkpoint.every == 0:
                await self._checkpoint(step)
            await self.checks.compare(step)
            if every and step % every == 0 and step < run.steps:
                await self._evaluate_beside(step, tasks)
        if self._evaluating is not None:
            await self._evaluating
        await delivery.arrived()
        await self.checks.evaluate(run.steps)
        saving = self.learner.save.remote(self.folder / "model")
        self.telemetry.remarks(await call(saving, "the learner to save", run.step_timeout_s))

    async def _step(self, step: int) -> StepResult:
        timeout_s = self.config.run.step_timeout_s + _ANSWER_TIMEOUT_S
        try:
            result: StepResult = await call(self.learner.step.remote(), f"step {step} of the learner", timeout_s)
        except DeadlineExceeded as error:
            raise self.fleet.blamed(error) from error
        return result

    async def _evaluate_beside(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate while training goes on; an evaluation that is still running is waited for first."""
        if self._evaluating is not None:
            await self._evaluating
        self._evaluating = tasks.create_task(self.checks.evaluate(step))

    async def _watch(self, address: Address) -> None:
        """See again and again that all goes well; what does not ends the run, with its reason."""
        for tick in itertools.count(1):
            await asyncio.sleep(_WATCH_S)
            self.delivery.raise_failure()
            self.fleet.check()
            self.telemetry.actors(await self.fleet.states())
            self.telemetry.delivery(self.delivery.skipped, self.delivery.repeated, self.fleet.restarts)
            ledger = await self._ledger(address)
            self.telemetry.ledger(ledger)
            if warning := self._drops.look(self.telemetry.steps, ledger, self.telemetry.last_error):
                self.telemetry.note(warning)
            if tick % _FLUSH_TICKS == 0:
                self.telemetry.flush()

    async def _ledger(self, address: Address) -> Ledger:
        """The ledger now; tells of an outage of the server, and of its end."""
        began = self.telemetry.now()
        try:
            return await asyncio.to_thread(read_ledger, replace(address, outage_s=0.0), self.origin.run_id)
        except BufferUnavailable as error:
            self.telemetry.note(f"{error}; the run waits {address.outage_s:g} s at most (buffer.outage_timeout_s)")
        ledger = await asyncio.to_thread(read_ledger, address, self.origin.run_id)
        self.telemetry.note(f"the buffer answers again, after {self.telemetry.now() - began:.1f} s")
        return ledger

    async def _keep_server_alive(self) -> None:
        while self.server is not None:
            await asyncio.sleep(_WATCH_S)
            if await asyncio.to_thread(self.server.revive):
                self.telemetry.note("the buffer's server had died and was started again on its data")

    async def _farewell(self, address: Address) -> None:
        """Give every process a second to end by itself, and read the ledger a last time. Ray sees to the rest."""
        import ray

        # vLLM's processes are often killed before they can unlink their own.
        segments = shared_memory(descendants())
        await self.delivery.close()
        await self.fleet.close()
        goodbyes = [self.learner.close.remote(), *self.fleet.goodbyes()]
        with suppress(Exception):
            await asyncio.to_thread(ray.wait, goodbyes, num_returns=len(goodbyes), timeout=_FAREWELL_S)
        with suppress(Exception):
            asked = replace(address, timeout_s=_FAREWELL_S, outage_s=0.0)
            self.telemetry.ledger(await asyncio.to_thread(read_ledger, asked, self.origin.run_id))
        for segment in segments:
            segment.unlink(missing_ok=True)
        self.fleet.remove_shared_memory()


def _forget(address: Address, origin: Origin) -> None:
    with suppress(BufferUnavailable):
        forget(discover(address), origin.run_id)
