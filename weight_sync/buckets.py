"""Buckets: a model's tensors cut into messages of bounded size, each with a header that says what it is.

Tensors of a layout go in on one end and come out on the other, in order. Pure functions and data; nothing here sends.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.layout import ALIGNMENT, Layout, NamedTensor, TensorSlot, expect, expect_end

_ROW_WORDS = 512
_MAGIC = b"CFB1"
_FIELDS = struct.Struct("<4sIIIQQQ")
_SEAL = struct.Struct("<I")


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `stop` of one tensor, which lie from byte `offset` of a bucket."""

    slot: TensorSlot
    start: int
    stop: int
    offset: int

    @property
    def whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.stop - self.start == self.slot.size_bytes

    @property
    def last(self) -> bool:
        """Whether the tensor ends here."""
        return self.stop == self.slot.size_bytes

    def view(self, payload: torch.Tensor) -> torch.Tensor:
        """Its elements in a bucket's bytes (uint8 [size_bytes]), in the tensor's dtype, flat."""
        raw = payload[self.offset : self.offset + self.stop - self.start]
        return raw.view(getattr(torch, self.slot.dtype))


@dataclass(frozen=True)
class Bucket:
    """One message: pieces of consecutive tensors, each aligned to 64 bytes."""

    index: int
    pieces: tuple[Piece, ...]
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """What precedes a bucket on its way."""

    generation: int
    version: int
    index: int
    count: int
    size_bytes: int
    checksum: int

    SIZE_BYTES = _FIELDS.size + _SEAL.size

    def encode(self) -> torch.Tensor:
        """The header as bytes, uint8 [SIZE_BYTES], sealed with a checksum of its own."""
        fields = _FIELDS.pack(
            _MAGIC, self.index, self.count, self.checksum, self.generation, self.version, self.size_bytes
        )
        return torch.frombuffer(bytearray(fields + _SEAL.pack(zlib.crc32(fields))), dtype=torch.uint8)

    @classmethod
    def decode(cls, raw: torch.Tensor) -> Header:
        """The header in these bytes.

        Raises:
            WeightSyncError: they are no header.
        """
        data = raw.cpu().numpy().tobytes()
        magic, index, count, checksum, generation, version, size_bytes = _FIELDS.unpack_from(data)
        if magic != _MAGIC or _SEAL.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size]):
            raise WeightSyncError(
                "a bucket came whose header is corrupted, or which another release of Counterflow sent: "
                "learner and actors must run the same one"
            )
        return cls(generation, version, index, count, size_bytes, checksum)


def plan(layout: Layout, bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets that carry a layout: at least one, none above `bucket_bytes` (64 at least).

    A tensor that fits a bucket is never cut; a larger one is cut over several, at multiples of 64 bytes.
    """
    capacity = max(bucket_bytes // ALIGNMENT, 1) * ALIGNMENT
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0
    for slot in layout.slots:
        start = 0
        while True:
            left = slot.size_bytes - start
            if pieces and left and (used == capacity or used + left > capacity >= slot.size_bytes):
                buckets.append(Bucket(len(buckets), tuple(pieces), used))
                pieces, used = [], 0
            stop = start + min(left, capacity - used)
            pieces.append(Piece(slot, start, stop, used))
            used += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            if pieces[-1].last:
                break
            start = stop
    return (*buckets, Bucket(len(buckets), tuple(pieces), used))


def largest_bytes(buckets: Iterable[Bucket]) -> int:
    """Memory that any bucket of the plan fits."""
    return max(bucket.size_bytes for bucket in buckets)


def fingerprint(buckets: Sequence[Bucket]) -> str:
    """A name for the plan, the same at two ends only where names, dtypes, shapes and cuts are."""
    description = [
        [(piece.slot.name, piece.slot.dtype, piece.slot.shape, piece.start, piece.stop) for piece in bucket.pieces]
        for bucket in buckets
    ]
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]


def checksum(payload: torch.Tensor) -> int:
    """CRC-32 of the sums of each 4 KiB of `payload` (uint8, a multiple of 64 bytes).

    Six times as fast as the CRC of the bytes, and made where they are. Changed, lost, foreign and displaced bytes are
    found; 8-byte words that changed places within 4 KiB are not.
    """
    words = payload.view(torch.int64)
    rows = words.numel() // _ROW_WORDS * _ROW_WORDS
    sums = words[:rows].view(-1, _ROW_WORDS).sum(dim=1)
    return zlib.crc32(torch.cat([sums, words[rows:]]).cpu().numpy().data)


def packed(
    buckets: Iterable[Bucket], tensors: Iterator[NamedTensor], free: Iterator[torch.Tensor]
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Each bucket with its bytes, copied out of `tensors` and converted to the layout's dtypes on the way.

    Args:
        buckets: the plan.
        tensors: the layout's tensors in its order; one is held at a time, so they may be made on the fly.
        free: gives, at each bucket, memory that nobody reads any more: uint8, as large as the largest bucket.

    Raises:
        WeightSyncError: `tensors` are not those of the layout.
    """
    tensor: torch.Tensor | None = None
    for bucket in buckets:
        payload = next(free)[: bucket.size_bytes]
        for piece in bucket.pieces:
            if tensor is None:
                tensor = expect(tensors, piece.slot)
            view = piece.view(payload)
            if piece.whole:
                view.view(piece.slot.shape).copy_(tensor)
            else:
                first = piece.start // view.element_size()
                view.copy_(tensor.reshape(-1)[first : first + view.numel()])
            if piece.last:
                tensor = None
        yield bucket, payload
    expect_end(tensors)


def unpacked(received: Iterable[tuple[Bucket, torch.Tensor]]) -> Iterator[NamedTensor]:
    """The tensors in a stream of buckets and their bytes.

    A tensor that came in one bucket is a view of its bytes, good until the next tensor is asked for; one that was cut
    is put together in memory of its own.
    """
    assembled: torch.Tensor | None = None
    for bucket, payload in received:
        for piece in bucket.pieces:
            view = piece.view(payload)
            if piece.whole:
                yield piece.slot.name, view.view(piece.slot.shape)
                continue
            if assembled is None:
                assembled = torch.empty(
                    piece.slot.size_bytes // view.element_size(), dtype=view.dtype, device=view.device
                )
            first = piece.start // view.element_size()
            assembled[first : first + view.numel()] = view
            if piece.last:
                yield piece.slot.name, assembled.view(piece.slot.shape)
                assembled = None
