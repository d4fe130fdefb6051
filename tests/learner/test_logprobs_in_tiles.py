"""Log-probs, entropies and full-vocabulary KL made tile by tile: the plain formula's, without its matrix."""

from __future__ import annotations

import copy
import math
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from counterflow.learner import liger
from counterflow.learner.logprobs import Projection, token_logprobs, token_statistics


def make(tokens=11, vocabulary=23, width=5, dtype=torch.float64, bias=True, scale=1.0):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    def projection():
        head = torch.nn.Linear(width, vocabulary, bias=bias, dtype=dtype)
        with torch.no_grad():
            head.weight.copy_(normal(vocabulary, width))
            if bias:
                head.bias.copy_(normal(vocabulary))
        return Projection(normal(tokens, width).requires_grad_(), head)

    return projection(), projection(), torch.randint(vocabulary, (tokens,), generator=generator)


def plain(policy, targets, temperature, reference):
    log_p = torch.log_softmax(policy.head(policy.hidden) / temperature, -1)
    log_q = torch.log_softmax(reference.head(reference.hidden) / temperature, -1).detach()
    p = log_p.exp()
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1)


def gradients(outputs, slopes, policy):
    leaves = [policy.hidden, *policy.head.parameters()]
    total = sum((o * s).sum() for o, s in zip(outputs, slopes, strict=True) if s is not None)
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", [(1, 1), (4, 7), (11, 23), (100, 100), None])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1, 2)])
def test_values_and_gradients_are_those_of_the_whole_matrix(used, tile, bias):
    policy, reference, targets = make(bias=bias)
    found = token_statistics(policy, targets, 0.7, reference, tile)
    found = (found.logprobs, found.entropies, found.divergences)
    expected = plain(policy, targets, 0.7, reference)
    slopes = [torch.linspace(-1, 2, 11, dtype=torch.float64) + n if n in used else None for n in range(3)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    for ours, theirs in zip(gradients(found, slopes, policy), gradients(expected, slopes, policy), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert reference.hidden.grad is None and reference.head.weight.grad is None


def test_extreme_logits_stay_finite_in_float32():
    policy, reference, targets = make(dtype=torch.float32, scale=30.0)
    found = token_statistics(policy, targets, 1.0, reference, (4, 7))
    expected = plain(policy, targets, 1.0, reference)
    for ours, theirs in zip((found.logprobs, found.entropies, found.divergences), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-5)
    (found.logprobs.sum() + found.entropies.sum() + found.divergences.sum()).backward()
    assert policy.hidden.grad.isfinite().all() and policy.head.weight.grad.isfinite().all()


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32():
    policy, _, targets = make(tokens=64, vocabulary=50, width=16, dtype=torch.float32)
    exact, _ = token_logprobs(policy.hidden, policy.head, targets, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found, entropies = token_logprobs(policy.hidden, policy.head, targets, 1.0)
    found.sum().backward()
    assert found.dtype == entropies.dtype == policy.head.weight.grad.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.3
    assert (found <= 0).all()


def confident(chance, tokens=64, vocabulary=50, width=16):
    """A policy that gives every target that chance: the last part of a hidden state lifts its target's logit alone."""
    policy, reference, targets = make(tokens, vocabulary, width, torch.float32, bias=False)
    lifted = []
    for projection in (policy, reference):
        with torch.no_grad():
            logits = projection.head(projection.hidden)
            others = logits.scatter(-1, targets[:, None], -torch.inf).logsumexp(-1)
            lift = others + math.log(chance / (1 - chance)) - logits.gather(-1, targets[:, None]).squeeze(-1)
            one_hot = torch.nn.functional.one_hot(targets, vocabulary)
            head = torch.nn.Linear(width + vocabulary, vocabulary, bias=False)
            head.weight.copy_(torch.cat([projection.head.weight, torch.eye(vocabulary)], 1))
        lifted.append(Projection(torch.cat([projection.hidden.detach(), lift[:, None] * one_hot], 1), head))
    return *lifted, targets


@pytest.mark.parametrize("chance", [0.5, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("used", [(0,), (2,), (0, 1, 2)])
def test_bfloat16_gradient_of_confident_tokens_is_as_good_as_the_plain_formulas(chance, used):
    """1 - p is all that is left of the target's slope: rounding p alone to bfloat16 would leave rounding errors."""
    policy, reference, targets = confident(chance)

    def gradients_of(statistics, dtype):
        own, other = (
            Projection(p.hidden.to(dtype).requires_grad_(), copy.deepcopy(p.head).to(dtype))
            for p in (policy, reference)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            outputs = statistics(own, other)
        return gradients(outputs, [torch.ones(64, dtype=dtype) if n in used else None for n in range(3)], own)

    def tiled(own, other):
        found = token_statistics(own, targets, 1.0, other, (16, 17))
        return found.logprobs, found.entropies, found.divergences

    def whole(own, other):
        return plain(own, targets, 1.0, other)

    exact, rival = gradients_of(whole, torch.float64), gradients_of(whole, torch.float32)
    for truth, theirs, ours in zip(exact, rival, gradients_of(tiled, torch.float32), strict=True):
        assert (ours - truth).norm() <= 1.2 * (theirs - truth).norm()


def test_no_tokens_and_no_gradient():
    policy, _, targets = make(tokens=0)
    logprobs, entropies = token_logprobs(policy.hidden, policy.head, targets, 1.0)
    assert logprobs.shape == entropies.shape == (0,)
    policy, _, targets = make()
    with torch.no_grad():
        assert not token_logprobs(policy.hidden, policy.head, targets, 1.0)[0].requires_grad
    assert not token_logprobs(policy.hidden, policy.head, targets, 1.0)[1].requires_grad


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return made


def test_the_whole_matrix_never_exists():
    policy, reference, targets = make(tokens=600, vocabulary=3000, width=4, dtype=torch.float32)
    with Largest() as largest:
        found = token_statistics(policy, targets, 1.0, reference)
        (found.logprobs.sum() + found.divergences.sum()).backward()
    assert largest.elements <= 512 * 1024 < 600 * 3000


def test_liger_is_used_where_it_is_installed_and_gives_the_same(monkeypatch):
    """With torch's own cross-entropy in its place: the kernel itself runs on GPUs only."""
    calls = []

    def kernel(logits, targets, reduction):
        calls.append(reduction)
        return torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)

    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_cross_entropy = kernel
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    liger.cross_entropy_kernel.cache_clear()
    try:
        found_kernel = liger.cross_entropy_kernel()
        assert found_kernel is kernel
    finally:
        liger.cross_entropy_kernel.cache_clear()
    monkeypatch.setattr(liger, "_CHUNK_ELEMENTS", 100)
    policy, _, targets = make(dtype=torch.float32)
    ours = token_logprobs(policy.hidden, policy.head, targets, 0.7)
    theirs = liger.liger_logprobs(found_kernel, policy.hidden, policy.head, targets, 0.7)
    assert calls and set(calls) == {"none"}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    slope = torch.linspace(-1, 1, 11)
    for a, b in zip(gradients(ours[:1], [slope], policy), gradients(theirs[:1], [slope], policy), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert not theirs[1].requires_grad


def test_liger_missing_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    liger.cross_entropy_kernel.cache_clear()
    assert liger.cross_entropy_kernel() is None
    liger.cross_entropy_kernel.cache_clear()
