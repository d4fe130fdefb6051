"""Fingerprints: every small change shows, and nothing else does."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.fingerprint import (
    Fingerprint,
    _sums_on_device,
    by_group,
    disagreements,
    fingerprint,
    group_of,
    in_wire_dtype,
)

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
dtypes = st.sampled_from(list(DTYPES))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The first fingerprint of a process takes longer than Hypothesis allows."""
    fingerprint(torch.ones(1))


@st.composite
def tensors(draw: st.DrawFn, min_size: int = 1) -> torch.Tensor:
    """Any bit patterns at all, not-a-number and minus zero among them."""
    dtype = draw(dtypes)
    bits = dtype.itemsize * 8
    patterns = st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    return torch.tensor(draw(st.lists(patterns, min_size=min_size, max_size=40)), dtype=DTYPES[dtype]).view(dtype)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


@given(tensors(), st.data())
def test_flipped_bit_goes_unseen(tensor: torch.Tensor, data: st.DataObject) -> None:
    flipped = tensor.clone()
    at = data.draw(st.integers(0, tensor.numel() * tensor.dtype.itemsize - 1))
    flipped.view(torch.uint8)[at] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(flipped) != fingerprint(tensor)


@given(tensors(min_size=2), st.data())
def test_two_errors_cancel(tensor: torch.Tensor, data: st.DataObject) -> None:
    changed = tensor.clone()
    words = words_of(changed)
    info = torch.iinfo(words.dtype)
    one, other = words[0].item(), words[1].item()
    # What the first gains the other loses, so that the plain sum stays.
    gain = data.draw(st.integers(max(info.min - one, other - info.max), min(info.max - one, other - info.min)))
    words[0], words[1] = one + gain, other - gain
    same = sorted(words[:2].tolist()) == sorted([one, other])
    assert (fingerprint(changed) == fingerprint(tensor)) == same


@given(tensors(min_size=3), st.data())
def test_fused_tensor_is_not_the_sum_of_its_parts(tensor: torch.Tensor, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, tensor.numel() - 1))
    parts = fingerprint(tensor[:at]) + fingerprint(tensor[at:])
    order = torch.tensor(data.draw(st.permutations(range(tensor.numel()))))
    # As integers, so that no not-a-number is quietened on the way.
    shuffled = tensor.view(DTYPES[tensor.dtype])[order].view(tensor.dtype)
    padded = torch.cat([shuffled, torch.zeros(5, dtype=tensor.dtype)])
    assert parts == fingerprint(tensor) == fingerprint(padded)


@given(tensors())
def test_sums_are_rounded_or_saturate(tensor: torch.Tensor) -> None:
    words = words_of(tensor).tolist()
    expected = Fingerprint(sum(words) % 2**32, sum(w * w for w in words) % 2**32)
    assert fingerprint(tensor) == expected
    assert pickle.loads(pickle.dumps(expected)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_or_transposed_tensor_is_read_in_part(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(523, 611).to(dtype)
    assert fingerprint(tensor.t()) == fingerprint(tensor)
    assert sum((fingerprint(row) for row in tensor), Fingerprint(0, 0)) == fingerprint(tensor)
    for place in (0, -1):
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        assert fingerprint(changed) != fingerprint(tensor)


@pytest.mark.parametrize("word", [-(1 << 15), (1 << 15) - 1])
def test_largest_words_are_rounded_in_a_full_chunk(word: int) -> None:
    count = 5_000_001
    words = torch.full((count,), word, dtype=torch.int16)
    assert fingerprint(words.view(torch.bfloat16)) == Fingerprint(count * word % 2**32, count * word * word % 2**32)
    assert _sums_on_device(words) == (count * word, count * word * word)


def test_engines_own_names_move_a_tensor_to_another_group() -> None:
    for ours, engines in (
        ("model.layers.11.self_attn.q_proj.weight", "model.layers.11.self_attn.qkv_proj.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "language_model.model.layers.3.mlp.gate_up_proj.weight"),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3.mlp.experts.w13_weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert group_of(ours) == group_of(engines)
    assert (
        len({group_of(f"model.{name}.weight") for name in ("layers.1.a", "layers.11.a", "norm", "embed_tokens")}) == 4
    )


def test_swapped_layers_or_a_missing_layer_agree() -> None:
    one, other = fingerprint(torch.ones(3)), fingerprint(torch.full((3,), 2.0))
    published = by_group([("layers.0.a.weight", one), ("layers.0.b.weight", one), ("layers.1.a.weight", other)])
    assert published == {"layers.0": one + one, "layers.1": other}
    assert disagreements(published, [published]) == []
    assert disagreements(published, [{"layers.0": other, "layers.1": one + one}]) == ["layers.0", "layers.1"]
    assert disagreements(published, [{"layers.0": one + one}]) == ["layers.1"]
    assert disagreements(published, [{**published, "layers.2": one}]) == ["layers.2"]


def test_shards_of_several_ranks_raise_a_false_alarm() -> None:
    one, other = fingerprint(torch.ones(3)), fingerprint(torch.full((3,), 2.0))
    published = {"layers.0": one, "layers.1": other}
    assert disagreements(published, [{"layers.0": other}, {"layers.0": other, "layers.1": one}]) == []
    assert disagreements(published, [{"layers.0": other}, {"layers.0": other}]) == ["layers.1"]


def test_engines_wider_dtype_raises_a_false_alarm_or_a_narrower_one_none() -> None:
    torch.manual_seed(0)
    sent = torch.randn(50).to(torch.bfloat16)
    assert fingerprint(in_wire_dtype("gate", sent.float(), torch.bfloat16)) == fingerprint(sent)
    for held, wire in ((sent.float() * 1.001, torch.bfloat16), (sent, torch.float32), (sent.half(), torch.bfloat16)):
        with pytest.raises(WeightSyncError, match=r"gate: the engine holds torch\..* not exactly"):
            in_wire_dtype("gate", held, wire)
