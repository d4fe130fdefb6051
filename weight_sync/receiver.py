"""The engine's end of weight sync: a weight-transfer engine that vLLM loads into its worker through its own factory.

vLLM finds `register` through the `vllm.general_plugins` entry point, in every process of an engine. Tensors flow from a
`Source` into the model; vLLM itself loads them under their checkpoint names, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from counterflow.weight_sync.adapter import Merger
from counterflow.weight_sync.fingerprint import fingerprint
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.loaded import LoadedWeights
from counterflow.weight_sync.sources import Source, open_source

BACKEND = "counterflow"
WORKER_EXTENSION = f"{__name__}.DeliveryProof"


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Whose engine this is, and what the learner will send."""

    actor: str
    layout: dict[str, Any]


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    """Which version comes which way."""

    version: int
    way: dict[str, Any]


class VersionReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """Loads versions, whatever way they come."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Learn what will be sent. A source that was open is closed."""
        self.shutdown()
        self._layout = Layout.from_dict(init_info.layout)
        adapter = self._layout.adapter
        self._merger = None if adapter is None else Merger(adapter, str(self.device))
        self._name = f"{init_info.actor}/{self.parallel_config.rank}"
        self._transport: str | None = None
        self._source: Source | None = None
        self._update: LoadedWeights
        self._unfinished = False
        # Compiles what an engine would else wait for, paused, at its first update.
        fingerprint(torch.zeros(1, device=self.device))

    def start_weight_update(self) -> None:
        """Prepare vLLM's layerwise reload, which repacks weights where the backend keeps them packed."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._unfinished:
            # vLLM would count a fused layer's parts of both updates, and take the layer for loaded before it is.
            self._update.let_go()
            finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = True
        self._update = LoadedWeights(self.model, self._layout.loaded_dtype)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Load every tensor of the version."""
        source = self._open(update_info.way["transport"])
        arrive = self._load if self._merger is None else self._merger.arrive
        source.receive(update_info.way, update_info.version, arrive)
        if self._merger is not None:
            self._merger.load(self._load)

    def finish_weight_update(self) -> None:
        """Complete the reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = False
        self._update.let_go()
        self._update.process_tied()

    def fingerprints(self) -> dict[str, list[int]]:
        """Fingerprints of what this rank's model holds since the last update, by tensor group, as plain data.

        Where an adapter arrived they are of that, once the model is seen to hold what was merged.
        """
        held = self._update.fingerprints()
        if self._merger is not None:
            held = self._merger.vouch(held, whole=self.parallel_config.world_size == 1)
        return {group: [found.words, found.squares] for group, found in held.items()}

    def shutdown(self) -> None:
        """Let go of the source, if there is one."""
        if (source := getattr(self, "_source", None)) is not None:
            source.close()

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._update.record(self.model.load_weights(tensors))

    def _open(self, transport: str) -> Source:
        if self._source is None or transport != self._transport:
            self.shutdown()
            self._source = open_source(transport, self._name, self._layout, str(self.device))
            self._transport = transport
        return self._source


class DeliveryProof:
    """What vLLM's worker learns to answer: its `worker_extension_cls`, mixed into the worker's class."""

    weight_transfer_engine: VersionReceiver

    def delivered_fingerprints(self) -> dict[str, list[int]]:
        """The receiver's fingerprints of what this worker's model holds."""
        return self.weight_transfer_engine.fingerprints()


def register() -> None:
    """Make the receiver known to vLLM's factory. vLLM calls this once or more in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, VersionReceiver.__name__)
