"""Buckets: what goes in comes out, whatever the shapes and wherever it is cut."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.buckets import (
    Header,
    checksum,
    fingerprint,
    largest_bytes,
    packed,
    plan,
    unpacked,
)
from counterflow.weight_sync.layout import Layout, lay_out

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def random_tensors(shapes: list[tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [(f"t{i}", torch.randn(shape)) for i, shape in enumerate(shapes)]


@given(SHAPES, st.integers(1, 2000), DTYPES)
def test_tensor_is_changed_by_cutting(shapes: list[tuple[int, ...]], bucket_bytes: int, dtype: torch.dtype) -> None:
    tensors = random_tensors(shapes)
    buckets = plan(lay_out(tensors, dtype), bucket_bytes)
    memory = cycle(torch.full((2, largest_bytes(buckets)), 255, dtype=torch.uint8))
    received = [(name, tensor.clone()) for name, tensor in unpacked(packed(buckets, iter(tensors), memory))]
    assert [name for name, _ in received] == [name for name, _ in tensors]
    for (_, sent), (_, got) in zip(tensors, received, strict=True):
        assert got.dtype == dtype and got.shape == sent.shape and torch.equal(got, sent.to(dtype))


@given(SHAPES, st.integers(1, 2000), DTYPES)
def test_bucket_is_too_large_or_tensor_cut_that_fits(
    shapes: list[tuple[int, ...]], bucket_bytes: int, dtype: torch.dtype
) -> None:
    buckets = plan(lay_out(random_tensors(shapes), dtype), bucket_bytes)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    capacity = max(64, bucket_bytes // 64 * 64)
    for bucket in buckets:
        assert bucket.size_bytes <= capacity
        for piece in bucket.pieces:
            assert piece.whole or piece.slot.size_bytes > capacity
            assert piece.stop > piece.start or piece.slot.size_bytes == 0


def test_transposed_tensor_arrives_in_memory_order() -> None:
    tensors = [("small", torch.randn(5, 3).T), ("cut", torch.randn(40, 30).T)]
    buckets = plan(lay_out(tensors, torch.float32), 512)
    memory = cycle(torch.zeros(2, largest_bytes(buckets), dtype=torch.uint8))
    for (_, sent), (_, got) in zip(tensors, unpacked(packed(buckets, iter(tensors), memory)), strict=True):
        assert torch.equal(sent, got)


def test_model_without_tensors_has_no_bucket() -> None:
    assert [bucket.size_bytes for bucket in plan(Layout((), 0), 64)] == [0]


@pytest.mark.parametrize(
    ("given_shapes", "message"),
    [
        ([(3,)], "ended where the layout has 't1'"),
        ([(3,), (2, 2), (1,)], "'t2' came after the last"),
        ([(3,), (4,)], r"'t1' of shape \(4,\) where the layout has 't1' of shape \(2, 2\)"),
    ],
)
def test_other_tensors_are_sent_than_announced(given_shapes: list[tuple[int, ...]], message: str) -> None:
    buckets = plan(lay_out(random_tensors([(3,), (2, 2)]), torch.float32), 64)
    memory = cycle(torch.zeros(2, largest_bytes(buckets), dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match=message):
        list(packed(buckets, iter(random_tensors(given_shapes)), memory))


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "bucket"])
def test_two_ends_cut_differently_unnoticed(change: str) -> None:
    tensors = [("a", torch.zeros(40)), ("b", torch.zeros(8, 2))]
    other = {
        "name": [("a", torch.zeros(40)), ("c", torch.zeros(8, 2))],
        "shape": [("a", torch.zeros(40)), ("b", torch.zeros(2, 8))],
    }.get(change, tensors)
    dtype = torch.bfloat16 if change == "dtype" else torch.float32
    theirs = plan(lay_out(other, dtype), 128 if change == "bucket" else 64)
    assert fingerprint(theirs) != fingerprint(plan(lay_out(tensors, torch.float32), 64))


@given(st.integers(0, 20_000), st.data())
def test_changed_byte_keeps_the_checksum(words: int, data: st.DataObject) -> None:
    payload = torch.arange(words * 64, dtype=torch.int64).to(torch.uint8)
    before = checksum(payload)
    if words:
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
        assert checksum(payload) != before


def test_rows_that_change_places_keep_the_checksum() -> None:
    payload = torch.arange(3 * 4096, dtype=torch.int32).view(torch.uint8)
    assert checksum(payload) != checksum(torch.cat([payload[4096:8192], payload[:4096], payload[8192:]]))


def test_corrupted_header_is_believed() -> None:
    header = Header(generation=3, version=1 << 40, index=5, count=7, size_bytes=1 << 33, checksum=0xFFFFFFFF)
    raw = header.encode()
    assert Header.decode(raw) == header and len(raw) == Header.SIZE_BYTES
    for at in range(len(raw)):
        changed = raw.clone()
        changed[at] ^= 1
        with pytest.raises(WeightSyncError, match="corrupted"):
            Header.decode(changed)
