"""Softmax statistics of a projection, forward and backward, one tile of tokens by vocabulary at a time.

In flow hidden states and the head's weight, out flow three numbers a token and, later, the gradients of both. A tile's
logits live only while it is worked on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Frozen = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states, weight and bias of a reference."""


def tiled_softmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    tile: tuple[int, int],
    reference: Frozen | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log p(y), H(p), KL(p || q)), each float [tokens], of p = softmax((hidden weight^T + bias) / temperature).

    q is that of the reference; without one the KL is 0. Differentiable once, in hidden, weight and bias.
    """
    found: tuple[Tensor, Tensor, Tensor] = TiledSoftmax.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, tile, reference
    )
    return found


def _precision(hidden: Tensor) -> torch.dtype:
    """dtype of the matrix products: that of autocast where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Layer:
    """A projection in the precision of its matrix products."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float

    def logits(self, rows: slice, columns: slice, out: Tensor | None) -> Tensor:
        """Float32 or float64 [tokens, vocabulary] of a tile; written to `out` where it has the shape and type."""
        hidden, weight = self.hidden[rows], self.weight[columns]
        wide = _wide(hidden.dtype)
        shape = (hidden.shape[0], weight.shape[0])
        fits = out is not None and out.dtype == hidden.dtype and out.shape == shape
        logits = torch.mm(hidden, weight.t(), out=out if fits else None).to(wide)
        if self.bias is not None:
            logits += self.bias[columns]
        return logits if self.temperature == 1 else logits.mul_(1 / self.temperature)


def _layer(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, precision: torch.dtype) -> _Layer:
    return _Layer(hidden.to(precision), weight.to(precision), bias, temperature)


class _Running:
    """Sums over a vocabulary that arrives in tiles: log of sum exp(z), and the mean of a value under softmax(z).

    All are kept relative to the highest z so far, and scaled down when a higher one comes.
    """

    def __init__(self, rows: int, like: Tensor, dtype: torch.dtype) -> None:
        self._highest = like.new_full((rows,), -torch.inf, dtype=dtype)
        self._total, self._own, self._other = (like.new_zeros(rows, dtype=dtype) for _ in range(3))

    def add(self, logits: Tensor, other: Tensor | None, scratch: Tensor | None) -> None:
        """`logits` float [rows, tile] is overwritten; `other`, of the same shape, is what the second mean is of."""
        highest = torch.maximum(self._highest, logits.amax(-1))
        rise = highest - self._highest
        shrink = torch.exp(-rise)
        # Before the first tile all sums are 0 and the rise is infinite.
        rise = torch.where(rise.isinf(), 0.0, rise)
        logits -= highest[:, None]
        fits = scratch is not None and scratch.dtype == logits.dtype and scratch.shape == logits.shape
        chance = torch.exp(logits, out=scratch if fits else None)
        self._own = shrink * (self._own - rise * self._total) + _dot(chance, logits)
        if other is not None:
            self._other = shrink * self._other + _dot(chance, other)
        self._total = shrink * self._total + chance.sum(-1)
        self._highest = highest

    @property
    def log_total(self) -> Tensor:
        """log sum exp(z): float [rows]."""
        return self._highest + self._total.log()

    @property
    def own_mean(self) -> Tensor:
        """Mean of log softmax(z): float [rows], minus the entropy."""
        return self._own / self._total - self._total.log()

    @property
    def other_mean(self) -> Tensor:
        """Mean of `other`: float [rows]."""
        return self._other / self._total


class TiledSoftmax(torch.autograd.Function):
    """`tiled_softmax`, of which the gradients in the logits are

    d log p(y) = onehot(y) - p,  dH = -p (log p + H),  dKL = p (log p - log q - KL).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: tuple[int, int],
        reference: Frozen | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        precision = _precision(hidden)
        wide = _wide(precision)
        found = hidden.new_zeros(5, hidden.shape[0], dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            layer = _layer(hidden, weight, bias, temperature, precision)
            frozen = None if reference is None else _layer(*reference, temperature, precision)
            buffers = [hidden.new_empty(tile, dtype=wide) for _ in range(2)]
            for at in range(0, hidden.shape[0], tile[0]):
                rows = slice(at, at + tile[0])
                chosen = found.new_zeros(targets[rows].shape[0])
                ours, theirs = (_Running(chosen.shape[0], hidden, wide) for _ in range(2))
                for start in range(0, weight.shape[0], tile[1]):
                    columns = slice(start, start + tile[1])
                    other = None
                    if frozen is not None:
                        other = frozen.logits(rows, columns, None)
                        theirs.add(other.clone(), None, buffers[1])
                    logits = layer.logits(rows, columns, buffers[0])
                    inside, place = _within(targets[rows], start, logits.shape[1])
                    chosen = torch.where(inside, logits.gather(-1, place[:, None]).squeeze(-1), chosen)
                    ours.add(logits, other, buffers[1])
                found[0, rows] = chosen - ours.log_total
                found[1, rows] = -ours.own_mean
                found[3, rows] = ours.log_total
                if frozen is not None:
                    found[2, rows] = ours.own_mean - ours.other_mean + theirs.log_total
                    found[4, rows] = theirs.log_total
        ctx.save_for_backward(hidden, weight, bias, targets, found, *(reference or ()))
        ctx.settings = (temperature, tile, precision)
        ctx.set_materialize_grads(False)
        return found[0].clone(), found[1].clone(), found[2].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, found, *reference = ctx.saved_tensors
        temperature, tile, precision = ctx.settings
        by_logprob, by_entropy, by_divergence = grads
        wide = _wide(precision)
        layer = _layer(hidden, weight, bias, temperature, precision)
        frozen = None
        if by_divergence is not None:
            states, matrix, offset = reference
            frozen = _layer(states, matrix, offset, temperature, precision)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden, dtype=wide) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        buffer = hidden.new_empty(tile, dtype=wide)
        for at in range(0, hidden.shape[0], tile[0]):
            rows = slice(at, at + tile[0])
            for start in range(0, weight.shape[0], tile[1]):
                columns = slice(start, start + tile[1])
                slope = layer.logits(rows, columns, buffer)
                slope -= found[3, rows, None]
                factor = None if by_logprob is None else -by_logprob[rows, None]
                if by_entropy is not None:
                    factor = _plus(factor, -by_entropy[rows, None] * (slope + found[1, rows, None]))
                if frozen is not None and by_divergence is not None:
                    away = slope - frozen.logits(rows, columns, None) + (found[4, rows] - found[2, rows])[:, None]
                    factor = _plus(factor, by_divergence[rows, None] * away)
                assert factor is not None
                slope.exp_().mul_(factor)
                if by_logprob is not None:
                    # Before narrowing: of 1 - p, with p rounded alone, a confident token would keep rounding errors.
                    inside, place = _within(targets[rows], start, slope.shape[1])
                    slope.scatter_add_(-1, place[:, None], torch.where(inside, by_logprob[rows], 0.0)[:, None])
                narrow = slope.to(precision)
                if to_bias is not None:
                    to_bias[columns] += slope.sum(0)
                if to_hidden is not None:
                    _add_product(to_hidden[rows], narrow, layer.weight[columns])
                if to_weight is not None:
                    _add_product(to_weight[columns], narrow.t(), layer.hidden[rows])
        nothing = (None,) * 4
        return (
            _scaled(to_hidden, temperature, hidden.dtype),
            _scaled(to_weight, temperature, weight.dtype),
            None if bias is None else _scaled(to_bias, temperature, bias.dtype),
            *nothing,
        )


def _within(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Bool [tokens]: the target lies in the tile of `size` from `start` on; int64 [tokens]: its column there, or 0."""
    place = targets - start
    inside = (place >= 0) & (place < size)
    return inside, torch.where(inside, place, 0)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Row by row, without a product matrix: float [rows]."""
    return torch.bmm(first[:, None, :], second[:, :, None]).flatten()


def _plus(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """total += first second, of which the total may be wider than the product."""
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    else:
        total += torch.mm(first, second)


def _scaled(value: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor | None:
    if value is None:
        return None
    return (value if temperature == 1 else value.mul_(1 / temperature)).to(dtype)
