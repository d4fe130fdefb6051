"""What the rollout actor costs: tokens/s through actor, rewards and buffer over bare AsyncLLM on the same requests.

Both use one engine in one Ray actor, in turn, several times over; the rival asks the engine and throws the answers
away. Tokens are those really sampled: ours by the ledger, the rival's by its answers.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from common import SMOLLM2_135M, TINY, Row, Shape, arguments, compare, publish, random_model, write_prompts

from counterflow import preflight
from counterflow.actors.rollout import RolloutActor
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import Lease, read_ledger
from counterflow.cluster import bundles, connect
from counterflow.configs.schema import RunConfig

ROUNDS = 3


class MeasuredActor(RolloutActor):
    """A rollout actor that can be let go for one batch of groups, and can ask its engine for the same itself."""

    async def prepare(self) -> None:
        """Start the engine and warm it up."""
        from counterflow.actors.vllm_engine import VllmEngine

        self._groups_ended, self._group_ended = 0, asyncio.Event()
        self._engine = await VllmEngine.start(self._config)
        self._engine.version = -1
        await self._engine.sample(self._prompt(0).token_ids)
        await self.begin()

    async def through_the_actor(self) -> float:
        """Seconds until the next batch of groups is on the stream."""
        start, target = time.monotonic(), self._groups_ended + self._config.admission.groups_per_step
        self._ready.version += 1
        self._new_version.set()
        while self._groups_ended < target:
            self._group_ended.clear()
            await self._group_ended.wait()
        return time.monotonic() - start

    async def bare(self) -> float:
        """Tokens/s of the engine alone on as many groups, with as many in flight."""
        from vllm.inputs.engine import tokens_input

        engine, config = self._ready, self._config
        room = asyncio.Semaphore(config.actors.groups_in_flight)

        async def ask(n: int) -> int:
            async with room:
                async for output in engine._llm.generate(
                    tokens_input(list(self._prompt(n).token_ids)), engine._sampled, f"bare-{n}-{time.monotonic()}"
                ):
                    final = output
                return sum(len(completion.token_ids) for completion in final.outputs)

        start = time.monotonic()
        counts = await asyncio.gather(*(ask(n) for n in range(config.admission.groups_per_step)))
        return sum(counts) / (time.monotonic() - start)

    async def _generate_group(self, lease: Lease) -> None:
        await super()._generate_group(lease)
        self._groups_ended += 1
        self._group_ended.set()


def measure(folder: Path, shape: Shape, dtype: str, groups: int, tokens: int) -> tuple[float, float]:
    """Median tokens/s of ours and of the rival."""
    import ray

    random_model(folder / "model", shape, dtype)
    write_prompts(folder / "prompts.jsonl", count=1000, length=32)
    config = RunConfig.model_validate(
        {
            "run": {"folder": folder, "steps": 1000},
            "model": {"path": folder / "model", "context_length": 256},
            "task": {"path": folder / "prompts.jsonl"},
            "sampling": {"max_tokens": tokens},
            "admission": {"groups_per_step": groups, "samples_per_group": 8, "max_lag": 0},
            "actors": {"dtype": dtype, "groups_in_flight": groups, "kv_cache_bytes": 512 << 20},
            "evaluation": {"prompts": 1},
        }
    )
    origin, task, _ = preflight.check(config)
    with EmbeddedServer(folder / "buffer", 10.0) as server, connect(config) as cluster:
        address = server.address
        actor = cluster.spawn(
            MeasuredActor, bundles(config)[1], 1, 0, task, config, address, origin, time.time(), cluster.cores(1)
        )
        ray.get(actor.prepare.remote(), timeout=300)
        ours, rival = [], []
        for _ in range(ROUNDS):
            before = read_ledger(address, origin.run_id).tokens_generated
            wall_s = ray.get(actor.through_the_actor.remote(), timeout=600)
            ours.append((read_ledger(address, origin.run_id).tokens_generated - before) / wall_s)
            rival.append(ray.get(actor.bare.remote(), timeout=600))
        ray.get(actor.stop.remote(), timeout=30)
    return statistics.median(ours), statistics.median(rival)


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    rows: list[Row] = []
    for name, shape, dtype, groups, tokens, goal in (
        ("SmolLM2-135M's shape, bfloat16, 8 x 8 x 64", SMOLLM2_135M, "bfloat16", 8, 64, 0.9),
        ("tiny Llama, float32, 64 x 8 x 32", TINY, "float32", 64, 32, None),
    ):
        with tempfile.TemporaryDirectory() as folder:
            ours, rival = measure(Path(folder), shape, dtype, groups, tokens)
        rows.append(compare(f"tokens/s, actor and buffer over bare AsyncLLM, {name}", ours, rival, "higher", goal))
    publish("Overhead of the rollout actor", rows, options.json)


if __name__ == "__main__":
    main()
