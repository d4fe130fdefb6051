"""The engine's end of weight sync: a weight-transfer engine that vLLM loads into its worker through its own factory.

vLLM finds `register` through the `vllm.general_plugins` entry point, in every process of an engine. Tensors flow from a
`Source` into the model; vLLM itself loads them under their checkpoint names, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from counterflow.weight_sync.fingerprint import fingerprint
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.loaded import LoadedWeights
from counterflow.weight_sync.sources import Intake

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
        self._intake = Intake(f"{init_info.actor}/{self.parallel_config.rank}", self._layout, str(self.device))
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
        self._intake.receive(
            update_info.way,
            update_info.version,
            lambda tensors: self._update.record(self.model.load_weights(tensors)),
        )

    def finish_weight_update(self) -> None:
        """Complete the reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = False
        self._update.let_go()
        self._update.process_tied()

    def fingerprints(self) -> dict[str, list[int]]:
        """Fingerprints of what this rank was sent and its model holds, by tensor group, as plain data."""
        received = self._intake.received(self._update.fingerprints(), whole=self.parallel_config.world_size == 1)
        return {group: [found.words, found.squares] for group, found in received.items()}

    def shutdown(self) -> None:
        """Let go of the source, if there is one."""
        if (intake := getattr(self, "_intake", None)) is not None:
            intake.close()


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
