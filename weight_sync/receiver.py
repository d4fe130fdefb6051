"""The engine's end of weight sync: a weight-transfer engine that vLLM loads into its worker through its own factory.

vLLM finds `register` through the `vllm.general_plugins` entry point, in every process of an engine. Weights flow from
the publisher's shared memory into the model; checkpoint names are loaded layer by layer by vLLM itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.loaded import LoadedWeights
from counterflow.weight_sync.publisher import map_slot

BACKEND = "counterflow_shared_memory"
WORKER_EXTENSION = f"{__name__}.DeliveryProof"


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Where the slots are, and how tensors lie in them."""

    paths: list[str]
    layout: dict[str, Any]


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """Which slot holds which version."""

    version: int
    slot: int


class SharedMemoryReceiver(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Loads a staged version out of shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Map the publisher's slots."""
        self._layout = Layout.from_dict(init_info.layout)
        for path in init_info.paths:
            if not Path(path).exists():
                raise WeightSyncError(
                    f"{path} is not on this host: shared memory reaches only actors on the learner's host"
                )
        self._slots: list[torch.Tensor] = [map_slot(Path(path), self._layout.total_bytes) for path in init_info.paths]

    def start_weight_update(self) -> None:
        """Prepare vLLM's layerwise reload, which repacks weights where the backend keeps them packed."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._update = LoadedWeights(self.model, self._layout.dtype)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load every tensor of the staged version."""
        buffer = self._slots[update_info.slot]
        self._update.record(self.model.load_weights(self._layout.views(buffer)))

    def finish_weight_update(self) -> None:
        """Complete the reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._update.let_go()
        self._update.process_tied()

    def fingerprints(self) -> dict[str, list[int]]:
        """Fingerprints of what this rank's model holds since the last update, by tensor group, as plain data."""
        return {group: [found.words, found.squares] for group, found in self._update.fingerprints().items()}

    def shutdown(self) -> None:
        """Let go of the slots."""
        self._slots = []


class DeliveryProof:
    """What vLLM's worker learns to answer: its `worker_extension_cls`, mixed into the worker's class."""

    weight_transfer_engine: SharedMemoryReceiver

    def delivered_fingerprints(self) -> dict[str, list[int]]:
        """The receiver's fingerprints of what this worker's model holds."""
        return self.weight_transfer_engine.fingerprints()


def register() -> None:
    """Make the receiver known to vLLM's factory. vLLM calls this once or more in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryReceiver.__name__)
