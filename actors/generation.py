"""What an actor asks of its engine, and which engine answers: vLLM's, or the slow one of transformers alone.

Flows in: prompts as token ids, seeds, versions. Flows out: completions with behaviour log-probs and version spans.
Imports neither engine: each is loaded where it is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from counterflow.buffer.trajectory import Float32Array, Int32Array, VersionSpan
from counterflow.configs.schema import RunConfig
from counterflow.errors import ProcessDied, WeightSyncError
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.publisher import Shipment


@dataclass(frozen=True)
class Completion:
    """One response: its tokens, their behaviour log-probs (natural, as sampled) and the versions that sampled them."""

    token_ids: Int32Array
    logprobs: Float32Array
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    """`stop`, or `length` for a truncated response."""


class Engine(Protocol):
    """Serves one policy version at a time. Token ids in, token ids out."""

    version: int
    """The version that it serves."""
    restarted: int
    """Requests that an update made it begin again."""

    @property
    def serving(self) -> bool:
        """Whether it serves its version now; false from `load` to `serve`."""

    async def sample(self, prompt_token_ids: Sequence[int], seed: int | None = None) -> list[Completion]:
        """Sample `admission.samples_per_group` responses to one prompt, the i-th with `seed` + i where there is one."""

    async def extend(self, token_ids: Sequence[int], max_tokens: int, seed: int | None = None) -> Completion:
        """Sample one more turn, of so many tokens at most, after these tokens."""

    async def decode_greedily(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Completion:
        """The most likely tokens after these, one by one, `sampling.max_tokens` at most where no other is given."""

    async def connect_weights(self, actor: str, layout: Layout) -> None:
        """Tell the engine whose it is, and what versions consist of."""

    async def load(self, shipment: Shipment) -> list[Fingerprints]:
        """Pause and load a version; returns what each rank holds then. No token is sampled until `serve`.

        Raises:
            WeightSyncError: the engine could not load the version. It stays paused; a later one may yet succeed.
        """

    async def serve(self, version: int) -> None:
        """Go on with the version that was loaded, now that it is proved.

        Raises:
            WeightSyncError: the engine could not. It stays paused.
        """

    def check(self) -> None:
        """Raise ProcessDied if a process of the engine has ended."""

    async def pulse(self) -> None:
        """Return when the engine has shown that it is at work, between two of its steps. A version may come between."""

    def shutdown(self) -> None:
        """End the engine and its processes."""


@contextmanager
def loading(version: int) -> Iterator[None]:
    """While the context is open a version is loaded: what goes wrong is a WeightSyncError, or the engine's death."""
    try:
        yield
    except (WeightSyncError, ProcessDied):
        raise
    except Exception as error:
        raise WeightSyncError(f"policy version {version} was not loaded: {error}") from error


async def start_engine(config: RunConfig) -> Engine:
    """Load the model, as policy version 0, into the engine that `actors.engine` names."""
    if config.actors.engine == "transformers":
        from counterflow.actors.transformers_engine import TransformersEngine

        return await TransformersEngine.start(config)
    from counterflow.actors.vllm_engine import VllmEngine

    return await VllmEngine.start(config)
