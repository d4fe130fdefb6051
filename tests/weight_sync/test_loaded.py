"""What a model holds after loading, on layers that pack their weights as vLLM's do on CPUs."""

from __future__ import annotations

import torch

from counterflow.weight_sync.fingerprint import Fingerprints, by_group, fingerprint
from counterflow.weight_sync.loaded import LoadedWeights


class Packing:
    """Takes the weight away, as oneDNN does; counts what it packed."""

    def __init__(self, *, keep: bool = False) -> None:
        self.keep, self.packed = keep, torch.empty(0)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        self.packed = weight.detach().clone()
        if not self.keep:
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Layer(torch.nn.Module):
    def __init__(self, method: Packing | None, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        if method is not None:
            self.quant_method = method


def model(first: float = 1.0) -> torch.nn.ModuleDict:
    embedding = Layer(Packing(keep=True), torch.full((4, 2), first))
    head = Layer(Packing(keep=True), torch.empty(0))
    head.weight = embedding.weight
    linear, norm = Layer(Packing(), torch.arange(6.0)), Layer(None, torch.ones(3))
    return torch.nn.ModuleDict({"embed": embedding, "linear": linear, "norm": norm, "head": head})


def process(layer: torch.nn.Module) -> None:
    layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]


def expected(given: torch.nn.ModuleDict) -> Fingerprints:
    return by_group((name, fingerprint(parameter)) for name, parameter in given.named_parameters())


def test_packed_weight_cannot_be_read_any_more() -> None:
    given = model()
    wanted = expected(given)
    update = LoadedWeights(given, torch.float32)
    for name in ("embed", "linear"):
        process(given[name])
    update.record({"embed.weight", "linear.weight", "norm.weight"})
    update.let_go()
    assert given["linear"].weight.numel() == 0
    assert update.fingerprints() == wanted
    assert set(wanted) == {"embed", "linear", "norm"}


def test_tensor_that_was_not_loaded_counts_as_loaded() -> None:
    given = model()
    update = LoadedWeights(given, torch.float32)
    process(given["linear"])
    update.record({"linear.weight"})
    assert set(update.fingerprints()) == {"linear"}


def test_weight_changed_after_packing_goes_unseen() -> None:
    given = model()
    wanted = expected(given)
    update = LoadedWeights(given, torch.float32)
    process(given["linear"])
    update.record(None)
    given["norm"].weight[1] = 3.0
    assert {group for group, found in update.fingerprints().items() if found != wanted[group]} == {"norm"}


def test_tied_head_keeps_its_old_packed_copy() -> None:
    given = model()
    for name in ("embed", "head"):
        process(given[name])
    update = LoadedWeights(given, torch.float32)
    given["embed"].weight.fill_(5.0)
    process(given["embed"])
    update.record({"embed.weight"})
    update.let_go()
    update.process_tied()
    assert torch.equal(given["head"].quant_method.packed, torch.full((4, 2), 5.0))


def test_abandoned_update_is_watched_for_ever() -> None:
    given = model()
    LoadedWeights(given, torch.float32)
    LoadedWeights(given, torch.float32).let_go()
    assert not any("process_weights_after_loading" in vars(layer.quant_method) for layer in (given["linear"],))
