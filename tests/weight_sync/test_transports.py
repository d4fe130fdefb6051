"""Transports without an engine: which is chosen, and what arrives over shared memory and disk."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, WeightSyncError
from counterflow.weight_sync.fingerprint import Fingerprints, by_group, fingerprint
from counterflow.weight_sync.layout import Layout, lay_out
from counterflow.weight_sync.publisher import Publisher, Shipment, StagedVersion, actor_of, receivers_of
from counterflow.weight_sync.slots import Slots
from counterflow.weight_sync.sources import open_source
from counterflow.weight_sync.transports import Disk, open_publisher, settle

NAMES = ("layers.0.weight", "layers.1.weight", "norm.weight")


def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((3, 4), float(10 * version + i))) for i, name in enumerate(NAMES)]


@pytest.fixture
def layout() -> Layout:
    return lay_out(tensors(0), torch.float32)


def configured(**sync: Any) -> RunConfig:
    gpus = sync.pop("gpus", 0)
    return RunConfig.model_validate({"weight_sync": sync, "learner": {"gpus": gpus}, "actors": {"gpus": gpus}})


@pytest.mark.parametrize(
    ("gpus", "one_host", "transport", "host"),
    [
        (0, True, "shared_memory", "127.0.0.1"),
        (0, False, "gloo", "10.0.0.7"),
        (1, True, "nccl", "127.0.0.1"),
        (1, False, "nccl", "10.0.0.7"),
    ],
)
def test_auto_chooses_a_transport_that_cannot_reach(gpus: int, one_host: bool, transport: str, host: str) -> None:
    sync = settle(configured(gpus=gpus), one_host, "10.0.0.7").weight_sync
    assert (sync.transport, sync.host) == (transport, host)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "shared_memory"}, "weight_sync.transport is shared_memory, .* several hosts"),
        ({"transport": "disk"}, "weight_sync.folder is missing"),
    ],
)
def test_transport_that_does_not_reach_other_hosts_is_taken(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settle(configured(**options), False, "10.0.0.7")


def test_host_that_was_given_is_overruled() -> None:
    assert settle(configured(host="learner.example"), False, "10.0.0.7").weight_sync.host == "learner.example"


def received(shipment: Shipment, layout: Layout) -> dict[str, torch.Tensor]:
    source, found = open_source(shipment.way["transport"], "actor 0/0", layout, "cpu"), {}

    def load(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        found.update({name: tensor.clone() for name, tensor in named})

    source.receive(shipment.way, shipment.version, load)
    source.close()
    return found


def proof(named: dict[str, torch.Tensor]) -> Fingerprints:
    return by_group((name, fingerprint(tensor)) for name, tensor in named.items())


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_other_weights_arrive_than_were_staged(transport: str, layout: Layout, tmp_path: Path) -> None:
    publisher = open_publisher(configured(transport=transport), layout, tmp_path)
    for version in range(1, 6):
        staged = publisher.stage(version, version % 2, tensors(version))
        shipment = publisher.prepare(staged, ["actor 0"])
        published = publisher.send(staged)
        found = received(shipment, layout)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors(version))
        assert proof(found) == published
    publisher.close()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_loader_that_changes_its_tensors_changes_those_of_others(layout: Layout, tmp_path: Path) -> None:
    publisher = open_publisher(configured(transport="shared_memory"), layout, tmp_path)
    rude = open_source("shared_memory", "actor 0/0", layout, "cpu")
    for version in (1, 3, 5):
        shipment, published = ship(publisher, publisher.stage(version, 1, tensors(version)))
        seen: dict[str, torch.Tensor] = {}

        def load(named: Iterator[tuple[str, torch.Tensor]], seen: dict[str, torch.Tensor] = seen) -> None:
            for name, tensor in named:
                seen[name] = tensor.clone()
                tensor.add_(1)

        rude.receive(shipment.way, version, load)
        assert proof(seen) == proof(received(shipment, layout)) == published == proof(dict(tensors(version)))
    publisher.close()


def shipped(layout: Layout, folder: Path, version: int = 1) -> Shipment:
    slots = Slots(layout)
    publisher = Publisher(slots, Disk(slots, folder))
    return publisher.prepare(publisher.stage(version, 0, tensors(version)), ["actor 0"])


def ship(publisher: Publisher, staged: StagedVersion) -> tuple[Shipment, Fingerprints]:
    return publisher.prepare(staged, ["actor 0"]), publisher.send(staged)


def test_second_try_takes_spoilt_weights_for_published_ones(layout: Layout, tmp_path: Path) -> None:
    publisher = open_publisher(configured(transport="shared_memory"), layout, tmp_path)
    staged = publisher.stage(1, 0, tensors(1))
    _, published = ship(publisher, staged)
    publisher._slots._buffers[0][0] ^= 1
    second, published_again = ship(publisher, staged)
    assert proof(received(second, layout)) != published_again == published
    # Staged anew, it is another's content.
    anew, published_anew = ship(publisher, publisher.stage(1, 0, tensors(5)))
    assert proof(received(anew, layout)) == published_anew != published
    publisher.close()


def test_version_that_was_broadcast_cannot_be_sent_again(layout: Layout, tmp_path: Path) -> None:
    publisher = open_publisher(configured(transport="gloo"), layout, tmp_path)
    sources = {name: open_source("gloo", f"{name}/0", layout, "cpu") for name in ("actor 0", "actor 1")}
    generations = []
    with ThreadPoolExecutor() as pool:
        for version in (1, 2, 2, 2, 3):
            staged = publisher.stage(version, version % 2, tensors(version))
            shipment = publisher.prepare(staged, list(sources))
            generations.append(shipment.way["invitation"]["generation"])
            found: list[dict[str, torch.Tensor]] = [{}, {}]
            loads = [
                pool.submit(source.receive, shipment.way, version, found[i].update)
                for i, source in enumerate(sources.values())
            ]
            published = publisher.send(staged)
            for load in loads:
                load.result(timeout=60)
            assert all(proof(each) == published for each in found)
    publisher.close()
    assert generations == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_file_is_loaded(share: float, layout: Layout, tmp_path: Path) -> None:
    shipment = shipped(layout, tmp_path)
    path = Path(shipment.way["path"])
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(WeightSyncError, match="cannot be read here .* weight_sync.folder must be a folder"):
        received(shipment, layout)


def test_file_of_another_version_is_loaded(layout: Layout, tmp_path: Path) -> None:
    first, second = shipped(layout, tmp_path / "a", 1), shipped(layout, tmp_path / "b", 2)
    Path(first.way["path"]).write_bytes(Path(second.way["path"]).read_bytes())
    with pytest.raises(WeightSyncError, match="holds policy version 2, not 1"):
        received(first, layout)


def test_flipped_bit_on_disk_goes_unseen(layout: Layout, tmp_path: Path) -> None:
    shipment = shipped(layout, tmp_path)
    path = Path(shipment.way["path"])
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert proof(received(shipment, layout)) != proof(dict(tensors(1)))


def test_disk_fills_up(layout: Layout, tmp_path: Path) -> None:
    slots = Slots(layout)
    publisher = Publisher(slots, Disk(slots, tmp_path))
    for version in range(1, 9):
        publisher.prepare(publisher.stage(version, version % 2, tensors(version)), ["actor 0"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"version-{v:08d}.safetensors" for v in (7, 8)]


def test_folder_that_cannot_be_written_hides_its_name(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match=r"version 1 cannot be written to .*file.*weight_sync.folder"):
        shipped(layout, tmp_path / "file")


def test_full_disk_leaves_half_a_version(tmp_path: Path) -> None:
    big = [("norm.weight", torch.zeros(1 << 18))]
    slots = Slots(lay_out(big, torch.float32))
    publisher = Publisher(slots, Disk(slots, tmp_path))
    staged = publisher.stage(1, 0, big)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(WeightSyncError, match="version 1 cannot be written to"):
            publisher.prepare(staged, ["actor 0"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
    publisher.prepare(staged, ["actor 0"])


def test_receiver_forgets_its_actor() -> None:
    names = list(receivers_of("actor 3", 2))
    assert names == ["actor 3/0", "actor 3/1"] and {actor_of(name) for name in names} == {"actor 3"}
