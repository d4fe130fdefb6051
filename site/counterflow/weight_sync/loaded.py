"""What a vLLM model really holds after an update: read after loading, and before a backend packs it out of sight.

On CPUs a linear weight is packed as soon as its layer is loaded and cannot be read afterwards. So the packing step,
`process_weights_after_loading` of each layer's quantization method, is watched while an update lasts. Knows vLLM's
conventions and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from counterflow.weight_sync.fingerprint import Fingerprint, Fingerprints, by_group, fingerprint, in_wire_dtype

_PROCESS = "process_weights_after_loading"


class LoadedWeights:
    """One update of one model, from before its first tensor is loaded.

    Args:
        model: the engine's model, or this rank's part of it.
        wire: the dtype in which weights are sent.
    """

    def __init__(self, model: torch.nn.Module, wire: torch.dtype) -> None:
        self._model, self._wire = model, wire
        self._names = {layer: name for name, layer in model.named_modules()}
        self._packed: dict[str, Fingerprint] = {}
        self._processed: set[torch.nn.Module] = set()
        self._loaded: set[str] | None = None
        self._methods = {id(method): method for layer in model.modules() if (method := _method(layer)) is not None}
        self.let_go()
        for method in self._methods.values():
            setattr(method, _PROCESS, partial(self._process, getattr(method, _PROCESS)))

    def record(self, names: Iterable[str] | None) -> None:
        """Note the parameters that the model says it loaded, under its own names; None if it does not say."""
        if names is not None:
            self._loaded = (self._loaded or set()) | set(names)

    def let_go(self) -> None:
        """Stop watching."""
        for method in self._methods.values():
            vars(method).pop(_PROCESS, None)

    def process_tied(self) -> None:
        """Process the layers whose parameter was loaded through another layer.

        vLLM processes only the layer that loads: a head tied to the embeddings would go on with its old packed copy.
        """
        fresh = {id(parameter) for name, parameter in self._model.named_parameters() if self._is_loaded(name)}
        for layer in self._model.modules():
            method = _method(layer)
            if method is None or layer in self._processed:
                continue
            if any(id(parameter) in fresh for parameter in layer.parameters(recurse=False)):
                getattr(method, _PROCESS)(layer)

    def fingerprints(self) -> Fingerprints:
        """Fingerprints of what the model holds now, tied weights once; a parameter that was not loaded is left out.

        Raises:
            WeightSyncError: a parameter is held in a dtype that cannot be compared exactly.
        """
        return by_group(
            (name, self._packed[name] if name in self._packed else self._read(name, parameter))
            for name, parameter in self._model.named_parameters()
            if self._is_loaded(name)
        )

    def _is_loaded(self, name: str) -> bool:
        return self._loaded is None or name in self._loaded

    def _read(self, name: str, parameter: torch.Tensor) -> Fingerprint:
        return fingerprint(in_wire_dtype(name, parameter.detach(), self._wire))

    def _process(self, process: Callable[[torch.nn.Module], None], layer: torch.nn.Module) -> None:
        before = {name: parameter.detach() for name, parameter in layer.named_parameters(recurse=False)}
        process(layer)
        self._processed.add(layer)
        for name, tensor in before.items():
            if not _same_memory(getattr(layer, name, None), tensor):
                whole = f"{self._names[layer]}.{name}"
                self._packed[whole] = self._read(whole, tensor)


def _method(layer: torch.nn.Module) -> Any:
    """A layer's quantization method, None where it has none."""
    method = getattr(layer, "quant_method", None)
    return method if hasattr(method, _PROCESS) else None


def _same_memory(now: torch.Tensor | None, before: torch.Tensor) -> bool:
    return (
        now is not None
        and now.data_ptr() == before.data_ptr()
        and (now.dtype, now.shape, now.stride()) == (before.dtype, before.shape, before.stride())
    )
