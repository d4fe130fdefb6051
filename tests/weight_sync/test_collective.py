"""Broadcast of weights: what arrives is what was sent, whoever dies, and nobody waits for ever."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collective_peers import (
    ANSWER_S,
    PROCESSES,
    Peer,
    Peers,
    broadcast,
    digest,
    form,
    made_on_the_fly,
    memory_bytes,
    reset_peak,
)
from torch.distributed.fsdp import fully_shard

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.buckets import Header
from counterflow.weight_sync.collective import Sender, gathered
from counterflow.weight_sync.group import Group
from counterflow.weight_sync.layout import Layout, NamedTensor, lay_out, named_weights

TIMEOUT_S = 60.0
SOON_S = TIMEOUT_S / 2
"""What needs no deadline takes less, on any machine."""
SHORT_S = 8.0
"""The deadline where one is to pass. How soon after it depends on the machine; the tests say 'not much later'."""
BUCKET_BYTES = 1 << 16
SHAPES: list[tuple[int, ...]] = [(7, 13), (), (0,), (1,), (3, 0, 2), (129, 257), (5, 1, 3, 2), (70_001,), (2,), ()]
"""The largest are cut over two and more buckets."""
LAST = f"weight-{len(SHAPES) - 1}"


def weights(version: int) -> list[NamedTensor]:
    """The weights of a version, other ones for each."""
    generator = torch.Generator().manual_seed(version)
    return [(f"weight-{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES)]


def mixed_layout() -> Layout:
    """Most tensors as bfloat16, every third as float32."""
    sixteen, thirty_two = (lay_out(weights(0), dtype) for dtype in (torch.bfloat16, torch.float32))
    slots = tuple((thirty_two if i % 3 == 0 else sixteen).slots[i] for i in range(len(SHAPES)))
    return Layout(slots, thirty_two.total_bytes)


LAYOUT = lay_out(weights(0), torch.float32)


@pytest.fixture
def peers() -> Iterator[Peers]:
    started = Peers(LAYOUT)
    yield started
    started.end(*started.all)


@pytest.fixture
def sender(request: pytest.FixtureRequest) -> Iterator[Sender]:
    """A sender; its deadline may be another, as the fixture's parameter."""
    sender = Sender(LAYOUT, bucket_bytes=BUCKET_BYTES, timeout_s=getattr(request, "param", TIMEOUT_S))
    yield sender
    sender.close()


short = pytest.mark.parametrize("sender", [pytest.param(SHORT_S, id="short")], indirect=True)


def failure(action: Callable[[], object], within_s: float = TIMEOUT_S) -> WeightSyncError:
    """The error that this raises, in time."""
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as raised:
        action()
    assert time.monotonic() - began < within_s
    return raised.value


@pytest.mark.parametrize("receivers", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1000, BUCKET_BYTES, 64 << 20])
def test_odd_tensors_arrive_changed(receivers: int, bucket_bytes: int) -> None:
    layout = mixed_layout()
    peers = Peers(layout)
    sender = Sender(layout, bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S)
    try:
        group = peers.start(*(f"actor-{i}" for i in range(receivers)))
        form(sender, group)
        for version in (0, 1, 5):
            expected = [
                (slot.name, tensor.to(getattr(torch, slot.dtype)))
                for slot, (_, tensor) in zip(layout.slots, weights(version), strict=True)
            ]
            assert broadcast(sender, group, version, weights(version)) == [digest(expected)] * receivers
    finally:
        sender.close()
        peers.end(*peers.all)
    assert not dist.is_initialized()


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_receivers_killed_at_any_moment_of_a_transfer(sender: Sender, peers: Peers, kills: int) -> None:
    moments = random.Random(5)
    survivors = peers.start("actor-0", "actor-1")
    for version in range(1, kills + 1):
        (victim,) = peers.start(f"victim-{version}")
        group = [*survivors]
        group.insert(moments.randrange(3), victim)
        form(sender, group)
        for peer in group:
            # The victim never comes to hold the version, however late it is killed.
            peer.ask("receive", version, 0.02, LAST if peer is victim else "")
        killer = threading.Timer(moments.uniform(0, 0.19), victim.signal, [signal.SIGKILL])
        killer.start()
        error = failure(lambda version=version: sender.send(version, weights(version)), SOON_S)
        killer.join()
        assert error.receivers == (victim.name,)
        assert f"{victim.name} died" in str(error) and f"version {version} stopped at bucket" in str(error)
        for peer in survivors:
            # One that has loaded the version before the other died has nothing to complain of.
            try:
                assert peer.answer() == digest(weights(version))
            except WeightSyncError:
                peer.ask("holds")
                assert peer.answer() is None
        peers.end(victim.name)
        form(sender, survivors)
        assert broadcast(sender, survivors, version, weights(version)) == [digest(weights(version))] * 2


@short
def test_frozen_receiver_holds_up_everyone(sender: Sender, peers: Peers) -> None:
    group = peers.start("actor-0", "actor-1", "actor-2")
    form(sender, group)
    frozen = group[0]
    for peer in group:
        # It takes no bucket after its first, however late it freezes; the others wait for it.
        peer.ask("receive", 1, 0.02, "weight-2" if peer is frozen else "")
    threading.Timer(0.05, frozen.signal, [signal.SIGSTOP]).start()
    error = failure(lambda: sender.send(1, weights(1)), 3 * SHORT_S)
    assert error.receivers == ("actor-0",) and "said no more" in str(error)
    for peer in group[1:]:
        failure(peer.answer, SOON_S)
    form(sender, group[1:])
    assert broadcast(sender, group[1:], 1, weights(1)) == [digest(weights(1))] * 2


def test_receiver_leaves_during_an_update(sender: Sender, peers: Peers) -> None:
    leaver, stayer = peers.start("leaver", "stayer")
    form(sender, [leaver, stayer])
    leaver.ask("leave_at", 1, "weight-5")
    stayer.ask("receive", 1)
    error = failure(lambda: sender.send(1, weights(1)), SOON_S)
    assert error.receivers == ("leaver",) and "leaver left (it had loaded" in str(error)
    failure(stayer.answer, SOON_S)
    failure(leaver.answer, SOON_S)
    form(sender, [stayer])
    assert broadcast(sender, [stayer], 1, weights(1)) == [digest(weights(1))]


def test_version_fails_because_one_that_holds_it_goes(sender: Sender, peers: Peers) -> None:
    quick, slow = peers.start("quick", "slow")
    form(sender, [quick, slow])
    quick.ask("receive", 1)
    quick.ask("close")
    slow.ask("receive", 1, 0.05)
    sender.send(1, weights(1))
    assert [peer.answer() for peer in (quick, slow)] == [digest(weights(1))] * 2
    quick.answer()
    slow.ask("receive", 2)
    assert failure(lambda: sender.send(2, weights(2)), SOON_S).receivers == ("quick",)
    failure(slow.answer)


def test_receiver_cannot_load(sender: Sender, peers: Peers) -> None:
    group = peers.start("actor-0", "actor-1")
    form(sender, group)
    group[0].ask("fail_at", 1, "weight-1")
    group[1].ask("receive", 1)
    error = failure(lambda: sender.send(1, weights(1)), SOON_S)
    assert error.receivers == ("actor-0",) and "actor-0 refused: no room" in str(error)
    assert "actor-0 refused version 1: no room" in str(failure(group[0].answer, SOON_S))
    failure(group[1].answer, SOON_S)
    group[0].ask("holds")
    assert group[0].answer() is None


def test_joiner_misses_the_newest_version(sender: Sender, peers: Peers) -> None:
    first = peers.start("actor-0")
    form(sender, first)
    broadcast(sender, first, 7, weights(7))
    group = [*first, *peers.start("joiner")]
    form(sender, group)
    assert broadcast(sender, group, 7, weights(7)) == [digest(weights(7))] * 2
    assert broadcast(sender, group, 8, weights(8)) == [digest(weights(8))] * 2


def test_versions_out_of_order(sender: Sender, peers: Peers) -> None:
    group = peers.start("actor-0")
    form(sender, group)
    broadcast(sender, group, 7, weights(7))
    for version in (6, 7):
        assert f"version {version} cannot follow version 7" in str(
            failure(lambda v=version: sender.send(v, weights(v)))
        )
    assert broadcast(sender, group, 8, weights(8)) == [digest(weights(8))]
    forgetful = Sender(LAYOUT, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
    form(forgetful, group)
    group[0].ask("receive", 7)
    assert "actor-0 refused: version 8 is here already" in str(failure(lambda: forgetful.send(7, weights(7)), SOON_S))
    failure(group[0].answer)
    form(forgetful, group)
    group[0].ask("receive", 9)
    assert "version 8 came where version 9 was expected" in str(failure(lambda: forgetful.send(8, weights(8)), SOON_S))
    failure(group[0].answer)


class Faulty(Sender):
    """Does something wrong with the fourth bucket."""

    fault = ""
    kept: tuple[Header, torch.Tensor] | None = None

    def _transmit(self, header: Header, payload: torch.Tensor, group: Group) -> list[dist.Work]:
        works: list[dist.Work] = []
        if header.index == 3:
            match self.fault:
                case "dropped":
                    return []
                case "duplicated":
                    works = super()._transmit(header, payload, group)
                case "reordered":
                    self.kept = header, payload.clone()
                    return []
                case "corrupted":
                    payload[777] ^= 1
                case "of another generation":
                    header = replace(header, generation=header.generation - 1)
                case "of another version":
                    header = replace(header, version=header.version - 1)
        works += super()._transmit(header, payload, group)
        if self.kept:
            works += super()._transmit(*self.kept, group)
            self.kept = None
        return works


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dropped", "bucket 4 came where bucket 3 of 7 was expected: one was lost"),
        ("duplicated", "bucket 3 came where bucket 4 of 7 was expected: it came twice or too late"),
        ("reordered", "bucket 4 came where bucket 3 of 7 was expected"),
        ("corrupted", "bucket 3 of 7 is corrupted"),
        ("of another generation", "bucket of generation 0 came in generation 1"),
        ("of another version", "bucket of version 0 came where version 1 was expected"),
    ],
)
def test_faulty_bucket_is_loaded(fault: str, message: str, peers: Peers) -> None:
    group = peers.start("actor-0", "actor-1")
    sender = Faulty(LAYOUT, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
    sender.fault = fault
    form(sender, group)
    for peer in group:
        peer.ask("receive", 1)
    assert message in str(failure(lambda: sender.send(1, weights(1)), SOON_S))
    # Both found it, or one was told of the other.
    errors = [str(failure(peer.answer, SOON_S)) for peer in group]
    assert any(message in error for error in errors)
    sender.fault = ""
    form(sender, group)
    assert broadcast(sender, group, 1, weights(1)) == [digest(weights(1))] * 2
    sender.close()


@pytest.mark.parametrize("host", [" ", "256.1.1.1", "no.such.host.invalid", "192.0.2.1"])
def test_host_that_is_not_the_learners_hides_its_key(host: str) -> None:
    sender = Sender(LAYOUT, BUCKET_BYTES, host, timeout_s=TIMEOUT_S)
    error = failure(lambda: sender.invite(["actor-0"]), SOON_S)
    assert repr(host) in str(error) and "weight_sync.host" in str(error) and error.receivers == ()
    sender.close()


@short
def test_receiver_never_comes(sender: Sender, peers: Peers) -> None:
    (here,) = peers.start("here")
    invitation = sender.invite(["here", "absent"])
    here.ask("join", invitation)
    error = failure(sender.connect, 3 * SHORT_S)
    assert error.receivers == ("absent",) and "no call from absent" in str(error)
    failure(here.answer, SOON_S)


def test_receiver_dies_before_the_group_is_complete(sender: Sender, peers: Peers) -> None:
    here, dead = peers.start("here", "dead")
    for delay_s in (0, 0.002, 0.005, 0.01, 0.02, 0.05):
        invitation = sender.invite(["here", "dead"])
        for peer in (here, dead):
            peer.ask("join", invitation)
        threading.Timer(delay_s, dead.signal, [signal.SIGKILL]).start()
        try:
            sender.connect()
        except WeightSyncError as error:
            assert error.receivers == ("dead",)
        here.ask("receive", 1)
        failure(lambda: sender.send(1, weights(1)), SOON_S)
        for _ in range(2):
            with suppress(WeightSyncError):
                here.answer()
        peers.end("dead")
        (dead,) = peers.start("dead")
    form(sender, [here, dead])
    assert broadcast(sender, [here, dead], 1, weights(1)) == [digest(weights(1))] * 2


def test_death_that_gloo_tells_first_has_no_name(sender: Sender, peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line ends a moment later than its connections to the others."""
    group = peers.start("here", "dead")
    invitation = sender.invite(["here", "dead"])
    for peer in group:
        peer.ask("join", invitation)

    def broken(*_: object) -> None:
        threading.Timer(0.2, group[1].signal, [signal.SIGKILL]).start()
        raise WeightSyncError("connection reset by peer")

    monkeypatch.setattr("counterflow.weight_sync.collective.Group", broken)
    error = failure(sender.connect, SOON_S)
    assert error.receivers == ("dead",) and "dead died" in str(error)


def test_model_with_other_tensors_joins(sender: Sender) -> None:
    other = Peers(lay_out(weights(0), torch.bfloat16))
    group = other.start("actor-0")
    invitation = sender.invite(["actor-0"])
    group[0].ask("join", invitation)
    assert "its model has other tensors" in str(failure(sender.connect, SOON_S))
    assert "its model has other tensors" in str(failure(group[0].answer, SOON_S))
    other.end("actor-0")


def test_strangers_call(sender: Sender, peers: Peers) -> None:
    group = peers.start("actor-0")
    invitation = sender.invite(["actor-0"])
    with (
        socket.create_connection((invitation.host, invitation.line_port)) as rude,
        socket.create_connection((invitation.host, invitation.line_port)) as silent,
        socket.create_connection((invitation.host, invitation.line_port)) as namesake,
    ):
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        namesake.sendall(b'{"name": "actor-9", "generation": 1, "plan": ""}\n')
        assert silent
        group[0].ask("join", invitation)
        sender.connect()
    group[0].answer()
    assert broadcast(sender, group, 1, weights(1)) == [digest(weights(1))]


def test_learner_stops_making_tensors(sender: Sender, peers: Peers) -> None:
    def broken() -> Iterator[NamedTensor]:
        yield from weights(1)[:7]
        raise ZeroDivisionError

    group = peers.start("actor-0")
    form(sender, group)
    group[0].ask("receive", 1)
    with pytest.raises(ZeroDivisionError):
        sender.send(1, broken())
    assert "the sender gave up" in str(failure(group[0].answer, SOON_S))


def test_other_ranks_are_left_in_a_gather(sender: Sender, peers: Peers) -> None:
    asked: list[str] = []

    def source() -> Iterator[NamedTensor]:
        for name, tensor in weights(1):
            asked.append(name)
            yield name, tensor

    (doomed,) = peers.start("doomed")
    form(sender, [doomed])
    peers.end("doomed")
    failure(lambda: sender.send(1, source()), SOON_S)
    assert len(asked) == len(SHAPES)
    failure(lambda: sender.send(2, source()), SOON_S)
    assert len(asked) == 2 * len(SHAPES)


def _send_without_end(pipe: Connection, count: int, timeout_s: float) -> None:
    def slow() -> Iterator[NamedTensor]:
        for name, tensor in weights(1):
            time.sleep(3600 if name == LAST else 0.05)
            yield name, tensor

    sender = Sender(LAYOUT, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)
    pipe.send(sender.invite([f"actor-{i}" for i in range(count)]))
    sender.connect()
    pipe.send("connected")
    sender.send(1, slow())


@pytest.mark.parametrize(
    ("number", "timeout_s", "within_s"), [(signal.SIGKILL, TIMEOUT_S, SOON_S), (signal.SIGSTOP, SHORT_S, 3 * SHORT_S)]
)
@pytest.mark.parametrize("moment", ["joining", "sending"])
def test_sender_dies_or_freezes(
    number: signal.Signals, timeout_s: float, within_s: float, moment: str, peers: Peers
) -> None:
    group = peers.start("actor-0", "actor-1")
    ours, theirs = PROCESSES.Pipe()
    learner = PROCESSES.Process(target=_send_without_end, args=(theirs, 2, timeout_s), daemon=True)
    learner.start()
    assert ours.poll(ANSWER_S) and learner.pid
    invitation = ours.recv()
    group[0].ask("join", invitation)
    if moment == "sending":
        group[1].ask("join", invitation)
        for peer in group:
            peer.answer()
        for peer in group:
            peer.ask("receive", 1)
    time.sleep(0.3)
    try:
        os.kill(learner.pid, number)
        for peer in group if moment == "sending" else group[:1]:
            failure(peer.answer, within_s)
    finally:
        learner.kill()
        learner.join()
    sender = Sender(LAYOUT, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
    form(sender, group)
    assert broadcast(sender, group, 1, weights(1)) == [digest(weights(1))] * 2
    sender.close()


COUNT, ELEMENTS, MEMORY_BUCKET = 24, 2 << 20, 8 << 20
"""Tensors of a bucket's size, 192 MiB in all."""


def _at_leisure(tensors: Iterator[NamedTensor], pausing: bool) -> Iterator[NamedTensor]:
    """The tensors; with pauses, waits run out, whose code is loaded then and not while memory is measured."""
    while (tensor := next(tensors, None)) is not None:
        if pausing:
            time.sleep(0.1)
        yield tensor
        del tensor


def _measure_sender(pipe: Connection, layout: Layout) -> None:
    torch.set_num_threads(1)
    # Freed tensors go back to the system at once, so that none is counted twice (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    sender = Sender(layout, bucket_bytes=MEMORY_BUCKET, timeout_s=20)
    for version in (1, 2):
        invitation = sender.invite(["actor-0"])
        before = reset_peak()
        pipe.send(invitation)
        sender.connect()
        sender.send(version, _at_leisure(made_on_the_fly(COUNT, ELEMENTS, version), version == 1))
    pipe.send(memory_bytes("VmHWM") - before)


def test_either_end_holds_more_than_two_buckets() -> None:
    layout = lay_out(made_on_the_fly(COUNT, ELEMENTS, 0), torch.float32)
    peers = Peers(layout)
    (peer,) = peers.start("actor-0")
    ours, theirs = PROCESSES.Pipe()
    learner = PROCESSES.Process(target=_measure_sender, args=(theirs, layout), daemon=True)
    learner.start()
    try:
        for version in (1, 2):
            assert ours.poll(ANSWER_S)
            peer.ask("peak_bytes", ours.recv(), version)
            received = peer.answer()
        assert ours.poll(ANSWER_S)
        sent = ours.recv() - 4 * ELEMENTS  # The tensor that the source makes.
    finally:
        learner.kill()
        learner.join()
        peers.end("actor-0")
    slack = 5 << 20  # Threads and sockets.
    print(f"sender {sent / 2**20:.1f} MiB, receiver {received / 2**20:.1f} MiB")
    assert sent < 2 * MEMORY_BUCKET + slack
    assert received < 2 * MEMORY_BUCKET + slack


def _sharded_model() -> torch.nn.Module:
    torch.manual_seed(11)
    return torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 7, bias=False), torch.nn.LayerNorm(7))


def _learner_rank(pipe: Connection, rank: int, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = _sharded_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if rank == 0:
        sender = Sender(lay_out(named_weights(model), torch.bfloat16), bucket_bytes=1024, timeout_s=TIMEOUT_S)
        pipe.send(sender.invite(["actor-0"]))
        sender.connect()
    for version in (1, 2):
        if rank == 0:
            sender.send(version, gathered(named_weights(model)))
        else:
            for _ in gathered(named_weights(model)):
                pass
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    pipe.send(int(total))
    pipe.poll(ANSWER_S)


def test_sharded_learner_sends_its_shard_alone(tmp_path: Path) -> None:
    pipes = [PROCESSES.Pipe() for _ in range(2)]
    ranks = [
        PROCESSES.Process(target=_learner_rank, args=(pipes[rank][1], rank, tmp_path / "rendezvous"), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    peer: Peer | None = None
    try:
        assert pipes[0][0].poll(ANSWER_S)
        peer = Peer("actor-0", lay_out(named_weights(_sharded_model()), torch.bfloat16))
        peer.ask("join", pipes[0][0].recv())
        peer.answer()
        expected = digest((name, tensor.to(torch.bfloat16)) for name, tensor in named_weights(_sharded_model()))
        for version in (1, 2):
            peer.ask("receive", version)
            assert peer.answer() == expected
        for ours, _ in pipes:
            # The learner's own process group still works.
            assert ours.poll(ANSWER_S) and ours.recv() == 3
            ours.send("end")
        for process in ranks:
            process.join(ANSWER_S)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
        if peer:
            peer.end()


def _measure_rank(pipe: Connection, rank: int, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, ELEMENTS // 1024, bias=False) for _ in range(COUNT)))
    for layer in model:
        fully_shard(layer)
    layout = lay_out(named_weights(model), torch.float32)
    if rank == 0:
        sender = Sender(layout, bucket_bytes=MEMORY_BUCKET, timeout_s=20)
        pipe.send(layout)
    for version in (1, 2):
        invitation = sender.invite(["actor-0"]) if rank == 0 else None
        before = reset_peak()
        dist.barrier()
        if rank == 0:
            pipe.send(invitation)
            sender.connect()
            sender.send(version, _at_leisure(gathered(named_weights(model)), version == 1))
        else:
            deque(gathered(named_weights(model)), maxlen=0)
    pipe.send(memory_bytes("VmHWM") - before)
    pipe.poll(ANSWER_S)


def test_rank_with_a_shard_holds_the_whole_model(tmp_path: Path) -> None:
    pipes = [PROCESSES.Pipe() for _ in range(2)]
    ranks = [
        PROCESSES.Process(target=_measure_rank, args=(pipes[rank][1], rank, tmp_path / "rendezvous"), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    peer: Peer | None = None
    try:
        assert pipes[0][0].poll(ANSWER_S)
        peer = Peer("actor-0", pipes[0][0].recv())
        for version in (1, 2):
            assert pipes[0][0].poll(ANSWER_S)
            peer.ask("peak_bytes", pipes[0][0].recv(), version)
            received = peer.answer()
        peaks = []
        for ours, _ in pipes:
            assert ours.poll(ANSWER_S)
            peaks.append(ours.recv())
            ours.send("end")
    finally:
        for process in ranks:
            process.kill()
        if peer:
            peer.end()
    gathering = 2 * 4 * ELEMENTS  # A tensor, and what gloo gathers it from.
    sent, helped = peaks[0] - gathering, peaks[1] - gathering
    print(f"sender {sent / 2**20:.1f} MiB, other rank {helped / 2**20:.1f} MiB, receiver {received / 2**20:.1f} MiB")
    slack = 5 << 20  # Threads and sockets.
    assert sent < 2 * MEMORY_BUCKET + slack
    assert helped < slack
    assert received < 2 * MEMORY_BUCKET + slack
