"""A real vLLM engine that is brought one version after the other, as delivery does it; each phase timed."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common import Shape, random_model
from common.timed_worker import TIMED_WORKER
from counterflow.cluster import process_environment
from counterflow.configs.schema import RunConfig
from counterflow.weight_sync.delivery import update
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import lay_out, named_weights
from counterflow.weight_sync.publisher import Shipment, StagedVersion
from counterflow.weight_sync.transports import open_publisher

PHASES = {
    "stage": "copy into the slot: all that the learner waits for",
    "prepare": "say where the slot is",
    "pause": "vLLM's own, when the step that goes on has ended",
    "transfer": "tensors handed to vLLM",
    "load": "vLLM's own loading and repacking",
    "proof": "fingerprints of what the engine holds",
    "wait": "for the fingerprints of the slot, taken meanwhile",
    "resume": "the calls between processes, resume",
}


@dataclass(frozen=True)
class Placement:
    """Where learner and engine are, and which way versions go between them."""

    dtype: str = "float32"
    device: str = "cpu"
    """The learner's."""
    gpus: int = 0
    """The engine's; it takes the first."""
    transport: str = "shared_memory"


class EngineUpdates:
    """An engine that starts with random weights of this shape and is brought version after version."""

    def __init__(self, folder: Path, shape: Shape, placement: Placement) -> None:
        path = random_model(folder / "model", shape, placement.dtype, placement.device)
        dtype = getattr(torch, placement.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(placement.device)
        self.layout = lay_out(named_weights(self._model), dtype)
        config = RunConfig.model_validate(
            {
                "model": {"path": path, "context_length": 256},
                "sampling": {"max_tokens": 16},
                "actors": {
                    "kv_cache_bytes": 128 << 20,
                    "dtype": placement.dtype,
                    "gpus": placement.gpus,
                    # The learner may be on the same GPU.
                    "gpu_memory_share": 0.5,
                },
                "weight_sync": {"transport": placement.transport},
            }
        )
        self._publisher = open_publisher(config, self.layout, folder)
        self._runner = asyncio.Runner()
        self._version = 0
        os.environ.update(process_environment(cpus=1, gpus=placement.gpus))
        from counterflow.actors import vllm_engine

        # vLLM finds the worker's extension by its name.
        setattr(vllm_engine, "WORKER_EXTENSION", TIMED_WORKER)  # noqa: B010
        self._engine = self._runner.run(vllm_engine.VllmEngine.start(config))
        self._runner.run(self._engine.connect_weights("actor 0", self.layout))
        self._ask("time_updates")
        core: Any = self._engine._llm.engine_core
        self._pause, core.pause_scheduler_async = core.pause_scheduler_async, self._timed_pause

    def once(self) -> dict[str, float]:
        """Seconds of each phase of one update."""
        self._version += 1
        began = time.perf_counter()
        staged = self._publisher.stage(self._version, self._version % 2, named_weights(self._model))
        staged_at = time.perf_counter()
        shipment = self._publisher.prepare(staged, ["actor 0"])
        prepared_at = time.perf_counter()
        wait_s = self._runner.run(self._serve(staged, shipment))
        stall = time.perf_counter() - prepared_at
        inside = self._ask("update_times")
        phases = {"pause": self._pause_s, **{phase: inside[phase] for phase in ("transfer", "load", "proof")}}
        phases["wait"] = wait_s
        return {
            "stage": staged_at - began,
            "prepare": prepared_at - staged_at,
            **phases,
            "resume": stall - sum(phases.values()),
        }

    async def _serve(self, staged: StagedVersion, shipment: Shipment) -> float:
        """As delivery does it; returns for how many seconds only the learner's fingerprints were missing."""
        sending = asyncio.create_task(asyncio.to_thread(self._publisher.send, staged))
        wait_s = 0.0

        async def published() -> Fingerprints:
            nonlocal wait_s
            began = time.perf_counter()
            found = await sending
            wait_s = time.perf_counter() - began
            return found

        await update(self._engine, shipment, published())
        return wait_s

    def close(self) -> None:
        """End the engine and free the slots."""
        self._engine.shutdown()
        self._runner.close()
        self._publisher.close()
        del self._engine, self._pause
        gc.collect()

    async def _timed_pause(self, **how: Any) -> None:
        began = time.perf_counter()
        await self._pause(**how)
        self._pause_s = time.perf_counter() - began

    def _ask(self, method: str) -> Any:
        return self._runner.run(self._engine._llm.collective_rpc(method))[0]
