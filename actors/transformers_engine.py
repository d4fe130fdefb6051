"""The engine for machines where vLLM cannot be installed: transformers alone, one prompt at a time. It is slow.

Prompts flow in, completions flow out; weights arrive through the same sources as vLLM's. What is sampled depends on
prompt, seed and weights and on nothing else: no other request ever shares a batch with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from counterflow.actors.decoding import Decoding, End, sampled_from
from counterflow.actors.generation import Completion, loading
from counterflow.configs.schema import RunConfig
from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import Fingerprints, by_group, fingerprint, in_wire_dtype
from counterflow.weight_sync.layout import Layout, named_weights
from counterflow.weight_sync.publisher import Shipment
from counterflow.weight_sync.sources import Intake

Answer = TypeVar("Answer")


class TransformersEngine:
    """A model that decodes the responses to one prompt after those to the other, and meets `Engine`.

    Between two tokens it may take other weights. Everything that touches the model runs in one thread.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._warpers = sampled_from(config.sampling)
        self._in_flight = config.weight_sync.in_flight
        self._recompute = config.weight_sync.caches_are_recomputed
        self._seeds = random.Random(config.run.seed)
        self._thread = ThreadPoolExecutor(1, "engine")
        self._turn = asyncio.Lock()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._layout: Layout
        self._intake: Intake | None = None
        self.version = 0
        self.restarted = 0
        """Requests that an update aborted and that were begun again."""

    @classmethod
    async def start(cls, config: RunConfig) -> TransformersEngine:
        """Load the model as policy version 0."""
        model = await asyncio.to_thread(
            AutoModelForCausalLM.from_pretrained,
            config.model.path,
            dtype=getattr(torch, config.actors.dtype),
            local_files_only=True,
            trust_remote_code=config.model.trust_remote_code,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        )
        return cls(model.to("cuda" if config.actors.gpus else "cpu").eval().requires_grad_(False), tokenizer, config)

    @property
    def serving(self) -> bool:
        """Whether it serves its version now; false from `load` to `serve`."""
        return self._open.is_set()

    async def sample(self, prompt_token_ids: Sequence[int], seed: int | None = None) -> list[Completion]:
        """Sample `admission.samples_per_group` responses to one prompt, the i-th with `seed` + i where there is one."""
        first = self._seeds.getrandbits(48) if seed is None else seed
        return await self._sample(prompt_token_ids, range(first, first + self._config.admission.samples_per_group))

    async def extend(self, token_ids: Sequence[int], max_tokens: int, seed: int | None = None) -> Completion:
        """Sample one more turn, of so many tokens at most, after these tokens."""
        seeds = [self._seeds.getrandbits(48) if seed is None else seed]
        return (await self._sample(token_ids, seeds, max_tokens))[0]

    async def decode_greedily(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Completion:
        """The most likely tokens after these, one by one, `sampling.max_tokens` at most where no other is given."""
        end, unused = self._end(len(token_ids), max_tokens), torch.Generator()

        def begin() -> Decoding:
            return Decoding(self._model, token_ids, [unused], LogitsProcessorList(), end, greedily=True)

        return (await self._decode(begin))[0]

    async def connect_weights(self, actor: str, layout: Layout) -> None:
        """Tell the engine whose it is, and what versions consist of."""
        self._layout = layout
        self._intake = await self._in_thread(partial(Intake, f"{actor}/0", layout, str(self._model.device)))
        # Compiles what it would else wait for, paused, at its first update.
        await self._in_thread(partial(fingerprint, torch.zeros(1)))

    async def load(self, shipment: Shipment) -> list[Fingerprints]:
        """Pause, between two tokens or responses, and load a version; returns what the model holds then.

        Raises:
            WeightSyncError: the version could not be loaded. The engine stays paused; a later one may yet succeed.
        """
        self._open.clear()
        if self._in_flight == "wait":
            await self._idle.wait()
        with loading(shipment.version):
            return [await self._in_thread(partial(self._load, shipment))]

    async def serve(self, version: int) -> None:
        """Go on with the version that was loaded."""
        self.version = version
        self._open.set()

    def check(self) -> None:
        """The engine has no process of its own."""

    async def pulse(self) -> None:
        """Return when the engine's thread has, which it does between two tokens."""
        await self._open.wait()
        await self._in_thread(lambda: None)

    def shutdown(self) -> None:
        """Decode no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._intake is not None:
            self._intake.close()

    async def _sample(
        self, token_ids: Sequence[int], seeds: Sequence[int], max_tokens: int | None = None
    ) -> list[Completion]:
        end = self._end(len(token_ids), max_tokens)

        def begin() -> Decoding:
            generators = [torch.Generator(self._model.device).manual_seed(seed) for seed in seeds]
            return Decoding(self._model, token_ids, generators, self._warpers, end)

        return await self._decode(begin)

    async def _decode(self, begin: Callable[[], Decoding]) -> list[Completion]:
        async with self._turn:
            await self._opened()
            self._idle.clear()
            try:
                decoding = begin()
                while not decoding.done:
                    if self._in_flight != "wait":
                        await self._opened()
                    if self._in_flight == "abort" and decoding.version not in (None, self.version):
                        self.restarted += 1
                        decoding = begin()
                    await self._in_thread(partial(decoding.step, self.version, recompute=self._recompute))
                return decoding.completions()
            finally:
                self._idle.set()

    async def _opened(self) -> None:
        """Return while a version is served: one that had just begun when another was to be loaded is over."""
        while not self._open.is_set():
            await self._open.wait()

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _end(self, tokens_before: int, max_tokens: int | None) -> End:
        """When what follows so many tokens ends: end of text, a stop text, or no room."""
        sampling, eos = self._config.sampling, self._tokenizer.eos_token_id
        most = min(max_tokens or sampling.max_tokens, self._config.model.context_length - tokens_before)
        # A token that is not special is a byte at least; one more, since decoders may strip what comes first.
        tail = max((len(text.encode()) for text in sampling.stop), default=0) + 1
        special = set(self._tokenizer.all_special_ids)

        def end(token_ids: list[int]) -> str | None:
            if token_ids[-1] == eos:
                return "stop"
            if sampling.stop:
                text = self._tokenizer.decode([i for i in token_ids if i not in special][-tail:])
                if any(stop in text for stop in sampling.stop):
                    return "stop"
            return "length" if len(token_ids) >= most else None

        return end

    def _load(self, shipment: Shipment) -> Fingerprints:
        assert self._intake is not None, "connect_weights() comes first"
        self._intake.receive(shipment.way, shipment.version, self._take)
        wire = self._layout.loaded_dtype
        held = by_group(
            (name, fingerprint(in_wire_dtype(name, tensor, wire))) for name, tensor in named_weights(self._model)
        )
        return self._intake.received(held, whole=True)

    def _take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(named_weights(self._model))
        for name, tensor in tensors:
            if name not in held or held[name].shape != tensor.shape:
                raise WeightSyncError(f"the engine's model has no {name} of shape {tuple(tensor.shape)}")
            held[name].copy_(tensor)
