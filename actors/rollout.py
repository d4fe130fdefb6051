"""The rollout actor: leases groups, has the engine sample them, scores them and streams them to the buffer.

Runs as a Ray actor, one event loop: generation goes on while groups are scored and weights arrive. Leases flow in from
the buffer, finished groups flow out to it; the supervisor sends weights and evaluations and reads the actor's state.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from psutil import Process
from transformers import AutoTokenizer

from counterflow.actors.busy_clock import BusyClock
from counterflow.actors.episodes import Episode, Player
from counterflow.actors.generation import Engine, start_engine
from counterflow.actors.heartbeat import Heartbeat
from counterflow.actors.reward_process import Scored
from counterflow.actors.rewards import RewardPool
from counterflow.actors.scoring import Scoring
from counterflow.actors.tasks import Prompt, TaskSet, prompt_index
from counterflow.buffer.admission import open_groups
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address
from counterflow.buffer.producer import Capacity, Closed, Lease, Producer
from counterflow.buffer.trajectory import Group, Origin, Trajectory
from counterflow.configs.schema import RunConfig
from counterflow.errors import BufferUnavailable, RunFailed
from counterflow.processes import descendants, end, pin, shared_memory
from counterflow.records import Interval
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.publisher import Shipment

_ADMISSION_POLL_S = 0.02
_GRACE_S = 1.0


@dataclass(frozen=True)
class ActorState:
    """What an actor says of itself when asked."""

    reward_failures: dict[str, int]
    """Samples without a reward since the start, by reason."""
    last_error: str | None
    """Why a group failed, if one did since it was last asked."""
    intervals: list[Interval]
    """What it did since it was last asked."""
    admission_closed: str | None
    """Why it may start no more groups now: `lag_budget` or `full`."""


class RolloutActor:
    """One engine and the groups it generates.

    Args:
        index: which actor of the run this is.
        task: the prompts, training and held-out.
        cores: CPU cores to stay on, engine processes included; None leaves the choice to the system.
        started_at: Unix time of the run's start, the zero of all times reported.
    """

    def __init__(
        self,
        index: int,
        task: TaskSet,
        config: RunConfig,
        address: Address,
        origin: Origin,
        started_at: float,
        cores: Sequence[int] | None,
    ) -> None:
        if cores:
            pin(cores)
        self._name, self._config, self._origin = f"actor {index}", config, origin
        self._schema = origin.schema()
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        )
        self._task = task
        self._player = Player(config, self._tokenizer)
        self._rewards = RewardPool(config)
        self._scoring = Scoring(config, self._tokenizer, self._rewards)
        admission = config.admission
        self._producer = Producer(
            address,
            origin.run_id,
            capacity=Capacity(
                config.buffer.capacity_groups, config.buffer.capacity_bytes, config.admission.groups_per_step
            ),
            lease_s=admission.lease_s,
            attempts=admission.attempts,
            holder=self._name,
        )
        self._engine: Engine | None = None
        self._heartbeat: Heartbeat | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._new_version, self._leaving = asyncio.Event(), asyncio.Event()
        self._busy = BusyClock(self._name, started_at)
        self._update = ExitStack()
        self._last_error: str | None = None
        self._closed: Closed | None = None

    async def start(self, layout: Layout) -> set[Path]:
        """Start the engine, at version 0, and tell it what later versions consist of.

        Returns the shared memory of its processes: killed, they cannot remove it.
        """
        self._engine = await start_engine(self._config)
        await self._engine.connect_weights(self._name, layout)
        self._heartbeat = Heartbeat(self._engine, self._config.actors.heartbeat_timeout_s)
        return shared_memory({Process(), *descendants()})

    async def begin(self) -> None:
        """Begin to generate groups, until `leave` or `stop`."""
        self._loop_task = asyncio.create_task(self._generate_groups())

    async def load(self, shipment: Shipment) -> list[Fingerprints]:
        """Pause and load a version; returns what the engine's ranks hold then.

        Raises:
            WeightSyncError: the engine could not load it.
            ProcessDied: the engine died.
        """
        # Until it serves a version the engine samples nothing, waits for the proof or another try.
        self._update.close()
        self._update.enter_context(self._busy.doing("update"))
        return await self._ready.load(shipment)

    async def serve(self, version: int) -> None:
        """Go on with the version that was loaded. Raises what `load` raises."""
        await self._ready.serve(version)
        self._update.close()
        self._new_version.set()

    async def evaluate(self, first: int, stride: int) -> list[float | None]:
        """Rewards of greedy responses to held-out prompts `first`, `first + stride`, ...; None where one failed."""
        prompts = self._task.heldout[first : self._config.evaluation.prompts : stride]
        with self._busy.doing("evaluate"):
            episodes = await asyncio.gather(*(self._player.decode_greedily(self._ready, p) for p in prompts))
            scores = await asyncio.gather(
                *(
                    self._scoring.episodes(p, [episode], self._config.run.step_timeout_s / 2)
                    for episode, p in zip(episodes, prompts, strict=True)
                )
            )
        return [sample.reward for (sample,) in scores]

    async def canaries(self, count: int) -> list[Group]:
        """Responses to the first held-out prompts, sampled as for training, without rewards of their own."""
        prompts = self._task.heldout[:count]
        began = time.time()
        with self._busy.doing("evaluate"):
            answers = await asyncio.gather(*(self._ready.sample(p.token_ids) for p in prompts))
        return [
            self._group(
                Lease(i, 1), prompt, [Episode.of(c) for c in completions], [Scored(0.0)] * len(completions), began
            )
            for i, (prompt, completions) in enumerate(zip(prompts, answers, strict=True))
        ]

    async def state(self) -> ActorState:
        """How the actor is doing. Raises what ended its loop, if something did."""
        if self._heartbeat is not None:
            self._heartbeat.check()
        if self._loop_task is not None and self._loop_task.done() and not self._loop_task.cancelled():
            self._loop_task.result()
        error, self._last_error = self._last_error, None
        closed = self._closed.name.lower() if self._closed else None
        return ActorState(dict(self._rewards.failures), error, self._busy.drain(), closed)

    async def leave(self) -> ActorState:
        """Start no more groups, wait for those that are being generated, then stop; returns the last state."""
        self._leaving.set()
        self._new_version.set()
        if self._loop_task is not None:
            await self._loop_task
        state = await self.state()
        await self.stop()
        return state

    async def end(self) -> None:
        """End every process below this one, whatever state it is in."""
        await asyncio.to_thread(end, descendants(), _GRACE_S)

    async def stop(self) -> None:
        """Stop generating and end the engine's and the reward pool's processes."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._rewards.close()
        if self._engine is not None:
            self._engine.shutdown()
        await self._producer.close()

    @property
    def _ready(self) -> Engine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    async def _generate_groups(self) -> None:
        limit = self._config.actors.groups_in_flight
        admission, uses = self._config.admission, self._config.buffer.uses
        ahead = admission.versions_ahead
        total = math.ceil(self._config.run.steps / uses) * admission.groups_per_step
        running: set[asyncio.Task[None]] = set()
        try:
            while running or not self._leaving.is_set():
                if len(running) < limit and not self._leaving.is_set():
                    self._new_version.clear()
                    opened = open_groups(self._ready.version, ahead, admission.groups_per_step, total, uses)
                    leases, self._closed = await self._producer.admit(opened, limit - len(running))
                    running.update(asyncio.create_task(self._generate_group(lease)) for lease in leases)
                await self._wait_for_room(running, limit)
                for task in [t for t in running if t.done()]:
                    running.remove(task)
                    task.result()
        finally:
            for task in running:
                task.cancel()

    async def _wait_for_room(self, running: set[asyncio.Task[None]], limit: int) -> None:
        if running and (len(running) >= limit or self._leaving.is_set()):
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            return
        # The budget may open by a new version here, a dropped group or an expired lease elsewhere.
        try:
            async with asyncio.timeout(_ADMISSION_POLL_S):
                await self._new_version.wait()
        except TimeoutError:
            pass

    async def _generate_group(self, lease: Lease) -> None:
        tokens = 0
        try:
            prompt = self._prompt(lease.admission)
            started_at = time.time()
            with self._busy.doing("generate"):
                episodes = await self._player.sample(self._ready, prompt, lease.admission)
            tokens = sum(len(episode.token_ids) for episode in episodes)
            rewards = await self._scoring.group(lease.admission, prompt, episodes)
            if all(sample.reward is None for sample in rewards):
                raise ValueError(f"every reward failed: {self._rewards.last_error}")
            group = self._group(lease, prompt, episodes, rewards, started_at)
            await self._producer.add(group, encode(group, self._schema))
        except (RunFailed, BufferUnavailable):
            raise
        except Exception as error:
            # One bad group must not end the actor: the lease goes back, the reason is kept and counted.
            self._last_error = f"group {lease.admission}, attempt {lease.attempt}: {type(error).__name__}: {error}"
            await self._producer.fail(lease, tokens)

    def _prompt(self, admission: int) -> Prompt:
        return self._task.train[prompt_index(admission, len(self._task.train), self._config.run.seed)]

    def _group(
        self,
        lease: Lease,
        prompt: Prompt,
        episodes: Sequence[Episode],
        rewards: Sequence[Scored],
        started_at: float,
    ) -> Group:
        return Group(
            group_id=f"{self._origin.run_id}/{lease.admission}",
            admission=lease.admission,
            prompt_id=prompt.prompt_id,
            prompt_token_ids=np.asarray(prompt.token_ids, np.int32),
            trajectories=tuple(
                Trajectory(
                    response_token_ids=episode.token_ids,
                    behavior_logprobs=episode.logprobs,
                    version_spans=episode.version_spans,
                    reward=sample.reward,
                    finish_reason=episode.finish_reason,
                    reward_parts=sample.parts,
                    loss_mask=episode.loss_mask,
                )
                for episode, sample in zip(episodes, rewards, strict=True)
            ),
            started_at_us=int(started_at * 1e6),
            finished_at_us=int(time.time() * 1e6),
        )
