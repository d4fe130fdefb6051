"""vLLM's AsyncLLM as an actor's engine, with in-flight weight updates. Token ids in, token ids out.

Prompts flow in, completions with behaviour log-probs and version spans flow out; weights arrive through vLLM's native
weight-transfer API. Imported only inside an actor's process, since it imports vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from counterflow.actors.generation import Completion, loading
from counterflow.buffer.trajectory import VersionSpan
from counterflow.configs.schema import RunConfig
from counterflow.errors import ProcessDied, RunFailed
from counterflow.weight_sync.fingerprint import Fingerprint, Fingerprints
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.publisher import Shipment
from counterflow.weight_sync.receiver import BACKEND, WORKER_EXTENSION

Answer = TypeVar("Answer")

_PULSE_S = 0.2
_SOCKETS = "VLLM_RPC_BASE_PATH"


class VllmEngine:
    """An AsyncLLM that serves one policy version at a time.

    Requests that arrive while weights are updated wait for the new version. Running ones are kept, drained or asked
    again (`weight_sync.in_flight`); no new one meets key-value cache of older weights.
    """

    def __init__(
        self, llm: AsyncLLM, config: RunConfig, sockets: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self._llm = llm
        self._sockets = sockets
        self._request_ids = itertools.count()
        self._open = asyncio.Event()
        self._open.set()
        self.version = 0
        self._salt = uuid.uuid4().hex
        self.restarted = 0
        """Requests that an update aborted, or let begin with older cache, and that were asked again."""
        self._in_flight = config.weight_sync.in_flight
        self._recompute = config.weight_sync.caches_are_recomputed
        sampling = config.sampling
        self._sampled = SamplingParams(
            n=config.admission.samples_per_group,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._greedy = self._sampled.clone()
        self._greedy.n, self._greedy.temperature = 1, 0.0
        self._greedy.top_p, self._greedy.top_k = 1.0, 0

    @classmethod
    async def start(cls, config: RunConfig) -> VllmEngine:
        """Load the model as policy version 0 and start the engine's processes."""
        arguments = AsyncEngineArgs(
            model=str(config.model.path),
            dtype=config.actors.dtype,
            max_model_len=config.model.context_length,
            trust_remote_code=config.model.trust_remote_code,
            seed=config.run.seed,
            enforce_eager=config.actors.enforce_eager,
            kv_cache_memory_bytes=config.actors.kv_cache_bytes,
            gpu_memory_utilization=config.actors.gpu_memory_share,
            tensor_parallel_size=max(config.actors.gpus, 1),
            logprobs_mode="processed_logprobs",
            weight_transfer_config={"backend": BACKEND},
            worker_extension_cls=WORKER_EXTENSION,
            generation_config="vllm",
            disable_log_stats=True,
        )
        # vLLM leaves its processes' sockets where it made them.
        folder = os.environ.get(_SOCKETS)
        sockets = tempfile.TemporaryDirectory(prefix="vllm-", dir=folder, ignore_cleanup_errors=True)
        os.environ[_SOCKETS] = sockets.name
        try:
            engine = cls(AsyncLLM.from_engine_args(arguments), config, sockets)
        finally:
            # The engine's processes have it by now.
            del os.environ[_SOCKETS]
            if folder is not None:
                os.environ[_SOCKETS] = folder
        await engine._llm.update_weight_version("0")
        return engine

    @property
    def serving(self) -> bool:
        """Whether it serves its version now; false from `load` to `serve`."""
        return self._open.is_set()

    async def sample(self, prompt_token_ids: Sequence[int], seed: int | None = None) -> list[Completion]:
        """Sample `admission.samples_per_group` responses to one prompt, the i-th with `seed` + i where there is one."""
        parameters = self._sampled
        if seed is not None:
            parameters = parameters.clone()
            # vLLM adds the index.
            parameters.seed = seed
        return await self._generate(prompt_token_ids, parameters)

    async def extend(self, token_ids: Sequence[int], max_tokens: int, seed: int | None = None) -> Completion:
        """Sample one more turn, of so many tokens at most, after these tokens."""
        parameters = self._sampled.clone()
        parameters.n, parameters.max_tokens, parameters.seed = 1, max_tokens, seed
        return (await self._generate(token_ids, parameters))[0]

    async def decode_greedily(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Completion:
        """The most likely tokens after these, one by one, `sampling.max_tokens` at most where no other is given."""
        parameters = self._greedy
        if max_tokens is not None:
            parameters = parameters.clone()
            parameters.max_tokens = max_tokens
        return (await self._generate(token_ids, parameters))[0]

    async def connect_weights(self, actor: str, layout: Layout) -> None:
        """Tell the engine whose it is, and what versions consist of."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"actor": actor, "layout": layout.to_dict()}
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def load(self, shipment: Shipment) -> list[Fingerprints]:
        """Pause and load a version; returns what each rank holds then. Requests that arrive from now on wait.

        No token is sampled until `serve`.

        Raises:
            WeightSyncError: the engine could not load the version. It stays paused; a later one may yet succeed.
        """
        self._open.clear()
        with loading(shipment.version):
            # `pause_generation` clears a cache of images, too, and sleeps for 20 ms, a third of a small model's stall,
            # so that outputs may come first: they carry versions.
            pause = self._llm.engine_core.pause_scheduler_async(mode=self._in_flight, clear_cache=self._recompute)
            await self._while_alive(pause)
            await self._while_alive(self._load(shipment))
            return await self._while_alive(self._held())

    async def serve(self, version: int) -> None:
        """Go on with the version that was loaded, now that it is proved.

        Raises:
            WeightSyncError: the engine could not. It stays paused.
        """
        with loading(version):
            await self._while_alive(self._llm.update_weight_version(str(version)))
            self.version = version
            # Of these weights alone: a number may come again, and requests that outlived its weights left cache, too.
            self._salt = uuid.uuid4().hex
            await self._while_alive(self._llm.resume_generation())
        self._open.set()

    async def _load(self, shipment: Shipment) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"version": shipment.version, "way": shipment.way}
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._llm.finish_weight_update()

    async def _while_alive(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """What a call of the engine answers. vLLM leaves one that its process did not live to answer waiting for ever.

        Raises:
            ProcessDied: the process ended.
        """
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=_PULSE_S))[0]:
                self.check()
            return task.result()
        except EngineDeadError as error:
            raise ProcessDied(f"the engine's process died: {error}") from error
        finally:
            task.cancel()

    async def _held(self) -> list[Fingerprints]:
        """The fingerprints of what each rank holds."""
        ranks = await self._llm.collective_rpc("delivered_fingerprints")
        return [{group: Fingerprint(*found) for group, found in rank.items()} for rank in ranks]

    def check(self) -> None:
        """Raise ProcessDied if one of the engine's processes has ended."""
        if self._llm.errored:
            raise ProcessDied("the engine's process died")

    async def pulse(self) -> None:
        """Return when the engine's process has answered, which it does between two steps."""
        await self._open.wait()
        await self._while_alive(self._llm.is_paused())

    def shutdown(self) -> None:
        """End the engine's processes, and remove their sockets."""
        # First, since nobody may wait for the rest: what is connected stays so.
        if self._sockets is not None:
            self._sockets.cleanup()
        self._llm.shutdown(timeout=1.0)

    async def _generate(self, prompt_token_ids: Sequence[int], parameters: SamplingParams) -> list[Completion]:
        while True:
            await self._open.wait()
            version = self.version
            outputs = await self._answer(prompt_token_ids, parameters, self._salt)
            # Aborted for an update, or begun after one with the cache from before it: asked again.
            if not any(output.finish_reason == "abort" or self._began_late(output, version) for output in outputs):
                return [_completion(output) for output in outputs]
            self.restarted += 1

    def _began_late(self, output: CompletionOutput, version: int) -> bool:
        """Whether a request that waited inside vLLM met, under new weights, prompt cache that the old ones left."""
        spans = output.weight_versions
        return not self._recompute and bool(spans) and int(spans[0].version) != version

    async def _answer(
        self, prompt_token_ids: Sequence[int], parameters: SamplingParams, salt: str
    ) -> list[CompletionOutput]:
        # The salt keeps a new request from the cache that older weights left, whoever still uses that.
        prompt = tokens_input(list(prompt_token_ids), cache_salt=salt)
        final = None
        try:
            async for output in self._llm.generate(prompt, parameters, f"r{next(self._request_ids)}"):
                final = output
        except EngineDeadError as error:
            raise ProcessDied(f"the engine's process died: {error}") from error
        if final is None or not final.finished:
            raise RunFailed("the engine ended a request without an answer")
        return sorted(final.outputs, key=lambda output: output.index)


def _completion(output: CompletionOutput) -> Completion:
    if output.weight_versions is None or output.logprobs is None:
        raise RunFailed("the engine answered without log-probs or weight versions")
    return Completion(
        token_ids=np.fromiter(output.token_ids, np.int32),
        # With `logprobs=0` there is one entry a position: the sampled token's.
        logprobs=np.asarray(output.logprobs.logprobs, np.float32),
        version_spans=tuple(VersionSpan(int(s.version), s.start, s.end) for s in output.weight_versions),
        finish_reason=output.finish_reason or "abort",
    )
