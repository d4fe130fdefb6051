"""A learner and real engines: who publishes, who is kept busy, and whether what was sampled is the version's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from llamas import save_llama
from transformers import LlamaForCausalLM

from counterflow.buffer.trajectory import Float32Array
from counterflow.configs.schema import RunConfig
from counterflow.weight_sync.delivery import Actor, Delivery, update
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import lay_out, named_weights
from counterflow.weight_sync.publisher import Publisher, Shipment, StagedVersion
from counterflow.weight_sync.slots import Slots
from counterflow.weight_sync.transports import BROADCASTS, SharedMemory, open_publisher

if TYPE_CHECKING:
    from counterflow.actors.generation import Completion, Engine
    from counterflow.actors.vllm_engine import VllmEngine

SHORT = (3, 4, 5, 6)
LONG = tuple(3 + (7 * i * i + i) % 500 for i in range(150))
"""Longer than a block of the prefix cache: only whole blocks are found there again."""
SAMPLES = 4
CLOSE = 1e-4
"""Largest difference of two log-probs in float32, in nats, that is rounding."""
_SCORED_AT_ONCE = 128


def make_model(folder: Path) -> None:
    """A random Llama that ends a response about once in 500 tokens and looks back at what came before."""
    save_llama(
        folder,
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=256,
        initializer_range=0.15,
    )


class Learner:
    """A learner whose versions have nothing in common but the model they started from. Serves as Delivery's port."""

    def __init__(self, config: RunConfig, folder: Path, seed: int = 0) -> None:
        self._seed = seed
        self._model: Any = LlamaForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self._first = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._temperature = config.sampling.temperature
        self._versions = {0: self._first}
        self.layout = lay_out(named_weights(self._model), torch.float32)
        self.publisher = open_publisher(config, self.layout, folder)
        self.version = 0
        self.given_up: list[tuple[str, str]] = []
        together = config.weight_sync.transport in BROADCASTS
        self.retried: list[str] = []
        self.delivery = Delivery(self, together, lambda actor, error: self.retried.append(f"{actor}: {error}"))

    async def join(self, name: str, actor: Actor) -> None:
        """Make an actor a receiver."""
        await self.delivery.join(name, actor, lambda error: self.given_up.append((name, str(error))))

    def first(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of version 0."""
        return ((slot.name, self._first[slot.name]) for slot in self.layout.slots)

    def step(self) -> None:
        """Make the next version."""
        self.version += 1
        noise = torch.Generator().manual_seed(self._seed + self.version)
        self._model.load_state_dict(
            {name: first + torch.randn(first.shape, generator=noise) * 0.05 for name, first in self._first.items()}
        )
        self._versions[self.version] = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    async def publish(self) -> None:
        """Make the next version and send it on its way."""
        self.step()
        await self.delivery.publish()

    async def deliver(self) -> None:
        """Make the next version and see it arrive."""
        await self.publish()
        await self.delivery.arrived()

    async def stage(self, slot: int) -> StagedVersion:
        return await asyncio.to_thread(self.publisher.stage, self.version, slot, named_weights(self._model))

    async def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        return await asyncio.to_thread(self.publisher.prepare, staged, actors)

    async def send(self, staged: StagedVersion) -> Fingerprints:
        return await asyncio.to_thread(self.publisher.send, staged)

    async def close(self) -> None:
        await self.delivery.close()
        self.publisher.close()

    def gaps(self, answers: Sequence[Answer]) -> list[Float32Array]:
        """How far each sampled token's log-prob is from what the version on its span says, in nats."""
        found = [np.full(len(answer.completion.token_ids), np.inf, np.float32) for answer in answers]
        for version in sorted({version for answer in answers for version in answer.versions}):
            self._model.load_state_dict(self._versions[version])
            sampled = [i for i, answer in enumerate(answers) if version in answer.versions]
            for at in range(0, len(sampled), _SCORED_AT_ONCE):
                batch = sampled[at : at + _SCORED_AT_ONCE]
                for i, scored in zip(batch, self._score([answers[i] for i in batch]), strict=True):
                    for span in answers[i].completion.version_spans:
                        if span.version == version:
                            here = slice(span.start, span.end)
                            found[i][here] = np.abs(scored - answers[i].completion.logprobs)[here]
        self._model.load_state_dict(self._versions[self.version])
        return found

    def worst(self, answers: Sequence[Answer]) -> float:
        """The largest of the gaps."""
        return max(float(gaps.max(initial=0)) for gaps in self.gaps(answers))

    def _score(self, answers: Sequence[Answer]) -> list[Float32Array]:
        rows = [torch.tensor([*answer.prompt, *answer.completion.token_ids.tolist()]) for answer in answers]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.no_grad():
            logprobs = torch.log_softmax(self._model(ids).logits[:, :-1] / self._temperature, -1)
        sampled = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1).numpy()
        return [
            row[len(answer.prompt) - 1 :][: len(answer.completion.token_ids)]
            for row, answer in zip(sampled, answers, strict=True)
        ]


@dataclass(frozen=True)
class Answer:
    """One response, and what the engine served when it was asked for."""

    prompt: tuple[int, ...]
    asked_of: int
    completion: Completion

    @property
    def versions(self) -> list[int]:
        """The versions that sampled it, in order."""
        return [span.version for span in self.completion.version_spans]


@dataclass
class Asker:
    """Keeps one engine busy with several prompts at once."""

    engine: Engine
    asked: int = 0
    answers: list[Answer] = field(default_factory=list)
    _over: bool = False

    async def ask(self, prompt: tuple[int, ...]) -> list[Answer]:
        """Have a group sampled."""
        self.asked += 1
        version = self.engine.version
        answers = [Answer(prompt, version, completion) for completion in await self.engine.sample(prompt)]
        self.answers += answers
        return answers

    @property
    def lost(self) -> int:
        """Responses that were asked for and did not come."""
        return self.asked * SAMPLES - len(self.answers)

    async def more(self, groups: int = 1) -> None:
        """Return when so many groups have been answered from now on."""
        enough = len(self.answers) + groups * SAMPLES
        while len(self.answers) < enough:
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Keep asking; at the end, wait for what was asked."""

        async def keep_asking(prompt: tuple[int, ...]) -> None:
            while not self._over:
                await self.ask(prompt)

        self._over = False
        async with asyncio.TaskGroup() as group:
            for prompt in (SHORT, LONG, LONG):
                group.create_task(keep_asking(prompt))
            # Where this fails, the tasks are cancelled: an engine that stayed paused would never answer.
            yield
            self._over = True


class Engines:
    """Real engines that start when they are first needed and then serve one test after the other."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._running: list[VllmEngine] = []
        self._processes: dict[int, psutil.Process] = {}

    async def serve(self, learner: Learner, count: int, config: RunConfig) -> list[VllmEngine]:
        """The first so many engines, which serve version 0 of this learner's model."""
        return [await self.one(learner, index, config) for index in range(count)]

    async def one(self, learner: Learner, index: int, config: RunConfig) -> VllmEngine:
        """Engine `index`, started if it does not run, which serves version 0 of this learner's model."""
        from counterflow.actors.vllm_engine import VllmEngine

        while len(self._running) <= index:
            before = _cores()
            started = await VllmEngine.start(self._config)
            self._running.append(started)
            (self._processes[id(started._llm)],) = _cores() - before
        engine = VllmEngine(self._running[index]._llm, config)
        await engine.connect_weights(name(index), learner.layout)
        slots = Slots(learner.layout)
        first = Publisher(slots, SharedMemory(slots))
        try:
            staged = first.stage(0, 0, learner.first())
            shipment = first.prepare(staged, [name(index)])
            await update(engine, shipment, known(first.send(staged)))
        finally:
            first.close()
        return engine

    def kill(self, engine: VllmEngine) -> None:
        """kill -9 of its process."""
        os.kill(self._processes[id(engine._llm)].pid, signal.SIGKILL)

    def stop(self, engine: VllmEngine) -> None:
        """Have its process hang."""
        os.kill(self._processes[id(engine._llm)].pid, signal.SIGSTOP)

    def forget(self, engine: VllmEngine) -> None:
        """Let go of one that was killed; another is started when it is needed."""
        self._running = [other for other in self._running if other._llm is not engine._llm]
        engine.shutdown()

    def close(self) -> None:
        for engine in self._running:
            engine.shutdown()


async def known(published: Fingerprints) -> Fingerprints:
    """What was published, where it need not be waited for."""
    return published


def name(index: int) -> str:
    """What Delivery calls an engine."""
    return f"engine {index}"


def _cores() -> set[psutil.Process]:
    """The engines' processes below this one."""
    below = psutil.Process().children(recursive=True)
    return {process for process in below if _is_core(process)}


def _is_core(process: psutil.Process) -> bool:
    try:
        return any("EngineCore" in word for word in process.cmdline())
    except psutil.Error:
        # It has ended since.
        return False
