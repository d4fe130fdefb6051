"""Fingerprints of weights: what a publisher says of a version, and what an engine must hold once it is loaded.

Exact integers that forget order and shape, so that an engine may fuse, pad or transpose what was sent: the fingerprint
of a fused tensor is the sum of its parts'. Pure functions on tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from counterflow.errors import WeightSyncError

Int16Array: TypeAlias = NDArray[np.int16]

_MODULUS = 1 << 32
_CHUNK = 1 << 22
"""Words that a device widens at once: as many as add up exactly in float64 (2^22 x 2^30 < 2^53)."""


@dataclass(frozen=True)
class Fingerprint:
    """Sums over the 16-bit words w of the elements, as signed integers: sum w and sum w^2, modulo 2^32.

    A change of one or two words always shows, unless the two changed places: so does any flipped bit. (By d and -d the
    squares change by 2 d e, e the difference of new and other word; neither d nor e has a factor of 2^16.) Zeros add
    nothing, so padding is invisible; so is the order of elements.
    """

    words: int
    squares: int

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of both sets of elements together."""
        return Fingerprint((self.words + other.words) % _MODULUS, (self.squares + other.squares) % _MODULUS)


Fingerprints: TypeAlias = dict[str, Fingerprint]
"""One fingerprint for each tensor group."""

NOTHING = Fingerprint(0, 0)


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """The fingerprint of a tensor of any shape, elements of 2 or 4 bytes. One pass over its bytes."""
    words = tensor.detach().reshape(-1).view(torch.int16)
    total, squares = _sums_on_cpu(words) if words.device.type == "cpu" else _sums_on_device(words)
    return Fingerprint(total % _MODULUS, squares % _MODULUS)


def _sums_on_device(words: torch.Tensor) -> tuple[int, int]:
    # One buffer for all: to take fresh pages for each part would cost as much as the arithmetic.
    buffer = torch.empty(min(_CHUNK, words.numel()), dtype=torch.float64, device=words.device)
    sums = []
    for part in torch.split(words, _CHUNK):
        # Exact, since every sum on the way is an integer below 2^53; a multiplication of int64 takes ten times as long.
        wide = buffer[: part.numel()].copy_(part)
        sums += [wide.sum(), wide.dot(wide)]
    total, squares = torch.stack(sums).to(torch.int64).view(-1, 2).sum(0).tolist()
    return total, squares


def _sums_on_cpu(words: torch.Tensor) -> tuple[int, int]:
    total, squares = _compiled_sums()(words.numpy())
    return int(total), int(squares)


@cache
def _compiled_sums() -> Callable[[Int16Array], tuple[int, int]]:
    """`_sums`, compiled: as fast as memory is read, where torch takes two to three times as long."""
    import numba

    compiled: Callable[[Int16Array], tuple[int, int]] = numba.njit("(int16[::1],)", nogil=True)(_sums)
    return compiled


def _sums(words: Int16Array) -> tuple[int, int]:
    """Sums of words and of their squares modulo 2^32: twice as many at once as in int64, which takes twice as long."""
    total = squares = np.int32(0)
    # By index: over the words themselves the loop is not vectorized.
    for i in range(words.size):
        word = np.int32(words[i])
        total = np.int32(total + word)
        squares = np.int32(squares + word * word)
    return int(total), int(squares)


def group_of(name: str) -> str:
    """The tensor group of a parameter: its decoder layer (`layers.3`), or its module where there is no layer (`norm`).

    Only the two segments around the index are kept: engines move the prefixes before them.
    """
    segments = name.split(".")
    index = next((i for i, segment in enumerate(segments) if segment.isdigit()), None)
    if index is not None:
        return ".".join(segments[max(index - 1, 0) : index + 1])
    return segments[-2] if len(segments) > 1 else name


def by_group(named: Iterable[tuple[str, Fingerprint]]) -> Fingerprints:
    """Fingerprints of named tensors, added up by group."""
    groups: Fingerprints = {}
    for name, found in named:
        group = group_of(name)
        groups[group] = groups.get(group, NOTHING) + found
    return groups


def in_wire_dtype(name: str, tensor: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """A tensor that an engine holds, in the dtype in which it was sent.

    Raises:
        WeightSyncError: the engine's dtype cannot hold that dtype's numbers, or holds a number that was not sent.
    """
    if tensor.dtype == wire:
        return tensor
    if torch.promote_types(tensor.dtype, wire) == tensor.dtype:
        sent = tensor.to(wire)
        if torch.equal(sent.to(tensor.dtype), tensor):
            return sent
    raise WeightSyncError(
        f"{name}: the engine holds {tensor.dtype} that is not exactly the {wire} that was sent: set actors.dtype to "
        "the dtype in which the engine keeps this model"
    )


def prove(where: str, published: Mapping[str, Fingerprint], held: Sequence[Mapping[str, Fingerprint]]) -> None:
    """See that an engine's ranks hold what was published.

    Args:
        where: actor and version, for the error.

    Raises:
        WeightSyncError: they do not; names the tensor groups.
    """
    if wrong := disagreements(published, held):
        raise WeightSyncError(
            f"{where}: the engine holds other weights than were published in tensor group {', '.join(wrong)}: "
            "something writes to this host's memory, or vLLM loads only a part of this model, or changes its numbers "
            "as it loads them"
        )


def disagreements(published: Mapping[str, Fingerprint], held: Sequence[Mapping[str, Fingerprint]]) -> list[str]:
    """The groups in which an engine's ranks do not hold what was published.

    One rank is compared exactly. Several hold shards of some tensors and copies of others, whose sums nobody published:
    there only a group that no rank loaded at all is a disagreement.
    """
    if len(held) == 1:
        return [group for group in {**published, **held[0]} if published.get(group) != held[0].get(group)]
    return [group for group in published if not any(group in rank for rank in held)]
