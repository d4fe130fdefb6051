"""Weight sync on GPUs: the broadcast between two, and on one all of it but the wire."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
import torch
from collective_peers import Peer, broadcast, digest, form

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.buckets import checksum, largest_bytes, packed, plan, unpacked
from counterflow.weight_sync.collective import Sender
from counterflow.weight_sync.fingerprint import by_group, fingerprint
from counterflow.weight_sync.layout import NamedTensor, lay_out
from counterflow.weight_sync.slots import Slots

BUCKET_BYTES = 1 << 16
TIMEOUT_S = 60.0

one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def weights(version: int, device: str) -> list[NamedTensor]:
    """Some smaller than a bucket, some cut over several."""
    generator = torch.Generator().manual_seed(version)
    shapes = [(7, 13), (), (129, 257), (70_001,), (2,)]
    return [(f"layers.{i}.weight", torch.randn(s, generator=generator).to(device)) for i, s in enumerate(shapes)]


@one_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_on_a_gpu_change_what_they_carry(dtype: torch.dtype) -> None:
    sent = weights(1, "cuda")
    slots = Slots(lay_out(sent, dtype), "cuda")
    slots.fill(1, sent)
    buckets = plan(slots.layout, BUCKET_BYTES)
    buffers = [torch.empty(largest_bytes(buckets), dtype=torch.uint8, device="cuda") for _ in range(2)]
    checksums = []

    def carried() -> Iterator[tuple[object, torch.Tensor]]:
        for bucket, payload in packed(buckets, slots.tensors(1), cycle(buffers)):
            checksums.append(checksum(payload) == checksum(payload.cpu()))
            yield bucket, payload

    arrived = {name: tensor.clone() for name, tensor in unpacked(carried())}  # type: ignore[arg-type]
    assert all(torch.equal(arrived[name], tensor.to(dtype)) for name, tensor in sent)
    assert checksums == [True] * len(buckets) and len(buckets) > 3
    on_gpu = by_group((name, fingerprint(tensor)) for name, tensor in arrived.items())
    assert on_gpu == by_group((name, fingerprint(tensor.cpu())) for name, tensor in arrived.items())


@one_gpu
def test_full_gpu_kills_the_learner() -> None:
    layout = lay_out(weights(0, "cpu"), torch.float32)
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(WeightSyncError, match="no room for 2 x"):
        Slots(type(layout)(layout.slots, free), "cuda")


@two_gpus
def test_nccl_brings_other_weights_than_were_sent() -> None:
    layout = lay_out(weights(0, "cpu"), torch.float32)
    sender = Sender(layout, backend="nccl", bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, device="cuda:0")
    peers = [Peer(f"actor {i}/0", layout, f"cuda:{i + 1}") for i in range(torch.cuda.device_count() - 1)]
    try:
        form(sender, peers)
        for version in (1, 2, 3):
            found = broadcast(sender, peers, version, weights(version, "cuda:0"))
            assert found == [digest(weights(version, "cpu"))] * len(peers)
        # One dies: named within the deadline, and the others go on without it.
        if len(peers) > 1:
            peers[0].end()
            for peer in peers[1:]:
                peer.ask("receive", 4)
            with pytest.raises(WeightSyncError, match="actor 0/0 died"):
                sender.send(4, weights(4, "cuda:0"))
            for peer in peers[1:]:
                with pytest.raises(WeightSyncError):
                    peer.answer()
            form(sender, peers[1:])
            assert broadcast(sender, peers[1:], 4, weights(4, "cuda:0")) == [digest(weights(4, "cpu"))] * (
                len(peers) - 1
            )
    finally:
        sender.close()
        for peer in peers:
            peer.end()
