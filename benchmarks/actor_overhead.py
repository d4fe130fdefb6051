"""What rollout actors cost: tokens/s through actors, rewards and buffer over bare AsyncLLMs on the same requests.

Both use one engine in each Ray actor, in turn, several times over; the rival asks the engines and throws the answers
away. Tokens are those really sampled: ours by the ledger, the rival's by its answers. Occupancy is the share of the
places in flight that hold a group, over the time of a batch.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import SMOLLM2_135M, TINY, Row, Shape, arguments, compare, publish, random_model, write_prompts

from counterflow import preflight
from counterflow.actors.heartbeat import Heartbeat
from counterflow.actors.rollout import RolloutActor
from counterflow.buffer.producer import Lease
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import read_ledger
from counterflow.cluster import bundles, connect
from counterflow.configs.schema import RunConfig

ROUNDS = 5


@dataclass(frozen=True)
class Batch:
    """What one actor did with one batch of groups."""

    tokens: int
    wall_s: float
    occupancy: float


class Places:
    """How many of the places in flight hold a group, summed over time."""

    def __init__(self, places: int) -> None:
        self._places, self._taken, self._filled_s, self._since = places, 0, 0.0, time.monotonic()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """One place more is taken."""
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)

    def drain(self, wall_s: float) -> float:
        """The share of places that were taken since the last time."""
        self._count(0)
        filled_s, self._filled_s = self._filled_s, 0.0
        return filled_s / (self._places * wall_s)

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._filled_s += self._taken * (now - self._since)
        self._taken, self._since = self._taken + change, now


class MeasuredActor(RolloutActor):
    """A rollout actor that can be let go for one batch of groups, and can ask its engine for the same itself."""

    async def prepare(self) -> None:
        """Start the engine and warm it up."""
        from counterflow.actors.vllm_engine import VllmEngine

        self._groups_ended, self._group_ended, self._tokens = 0, asyncio.Event(), 0
        self._places = Places(self._config.actors.groups_in_flight)
        self._engine = await VllmEngine.start(self._config)
        self._engine.version = -1
        self._heartbeat = Heartbeat(self._engine, self._config.actors.heartbeat_timeout_s)
        ask = self._engine.sample

        async def counted(*arguments: Any) -> Any:
            with self._places.taken():
                found = await ask(*arguments)
            self._tokens += sum(len(completion.token_ids) for completion in found)
            return found

        await ask(self._prompt(0).token_ids)
        self._engine.sample = counted  # type: ignore[method-assign]
        await self.begin()

    async def through_the_actor(self) -> Batch:
        """Until as many groups as are in flight at once are on the stream."""
        start, target = time.monotonic(), self._groups_ended + self._config.actors.groups_in_flight
        self._places.drain(1.0)
        before = self._tokens
        self._ready.version += 1
        self._new_version.set()
        while self._groups_ended < target:
            self._group_ended.clear()
            await self._group_ended.wait()
        wall_s = time.monotonic() - start
        return Batch(self._tokens - before, wall_s, self._places.drain(wall_s))

    async def bare(self) -> Batch:
        """The engine alone on as many groups."""
        from vllm.inputs.engine import tokens_input

        engine, groups = self._ready, self._config.actors.groups_in_flight

        async def ask(n: int) -> int:
            prompt, name = tokens_input(list(self._prompt(n).token_ids)), f"bare-{n}-{time.monotonic()}"
            with self._places.taken():
                async for output in engine._llm.generate(prompt, engine._sampled, name):  # type: ignore[attr-defined]
                    final = output
            return sum(len(completion.token_ids) for completion in final.outputs)

        start = time.monotonic()
        self._places.drain(1.0)
        counts = await asyncio.gather(*(ask(n) for n in range(groups)))
        wall_s = time.monotonic() - start
        return Batch(sum(counts), wall_s, self._places.drain(wall_s))

    async def _generate_group(self, lease: Lease) -> None:
        await super()._generate_group(lease)
        self._groups_ended += 1
        self._group_ended.set()


def measure(folder: Path, shape: Shape, dtype: str, groups: int, tokens: int, actors: int) -> list[list[float]]:
    """Median tokens/s and occupancy, of ours and of the rival."""
    import ray

    random_model(folder / "model", shape, dtype)
    write_prompts(folder / "prompts.jsonl", count=1000, length=32)
    config = RunConfig.model_validate(
        {
            "run": {"folder": folder, "steps": 1000},
            "model": {"path": folder / "model", "context_length": 256},
            "task": {"path": folder / "prompts.jsonl"},
            "sampling": {"max_tokens": tokens},
            "admission": {"groups_per_step": groups * actors, "samples_per_group": 8, "max_lag": 0},
            "actors": {"dtype": dtype, "groups_in_flight": groups, "kv_cache_bytes": 512 << 20},
            "evaluation": {"prompts": 1},
        }
    )
    origin, task, _ = preflight.check(config)
    with EmbeddedServer(folder / "buffer", 10.0) as server, connect(config) as cluster:
        common = (task, config, server.address, origin, time.time())
        # The second takes the learner's place: each has a core.
        fleet = [
            cluster.spawn(MeasuredActor, bundles(config)[1], place, place, *common, cluster.cores(place))
            for place in (1, 0)[:actors]
        ]
        ray.get([actor.prepare.remote() for actor in fleet], timeout=300)
        ours, rival = [], []
        for _ in range(ROUNDS):
            before = read_ledger(server.address, origin.run_id).tokens_generated
            ours.append(together(ray.get([actor.through_the_actor.remote() for actor in fleet], timeout=600)))
            made = read_ledger(server.address, origin.run_id).tokens_generated - before
            assert made == round(ours[-1][2]), "what the actors sampled is not what is on the stream"
            rival.append(together(ray.get([actor.bare.remote() for actor in fleet], timeout=600)))
        ray.get([actor.stop.remote() for actor in fleet], timeout=30)
    return [[statistics.median(column) for column in zip(*found, strict=True)] for found in (ours, rival)]


def together(batches: list[Batch]) -> tuple[float, float, int]:
    """Tokens/s of actors that worked at the same time, their occupancy, and their tokens."""
    tokens = sum(batch.tokens for batch in batches)
    return (
        tokens / max(batch.wall_s for batch in batches),
        statistics.mean(batch.occupancy for batch in batches),
        tokens,
    )


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    rows: list[Row] = []
    for name, shape, dtype, groups, tokens, actors, goal in (
        ("SmolLM2-135M's shape, bfloat16, 8 x 8 x 64", SMOLLM2_135M, "bfloat16", 8, 64, 1, 0.95),
        ("SmolLM2-135M's shape, bfloat16, 8 x 8 x 64", SMOLLM2_135M, "bfloat16", 8, 64, 2, 0.95),
        ("tiny Llama, float32, 64 x 8 x 32", TINY, "float32", 64, 32, 1, 0.8),
    ):
        with tempfile.TemporaryDirectory() as folder:
            ours, rival = measure(Path(folder), shape, dtype, groups, tokens, actors)
        rows.append(compare(f"tokens/s, {actors} actor(s), {name}", ours[0], rival[0], "higher", goal))
        rows.append(compare(f"occupancy, {actors} actor(s), {name}", ours[1], rival[1], "higher", None))
    publish("Rollout actors over bare AsyncLLMs", rows, options.json)


if __name__ == "__main__":
    main()
