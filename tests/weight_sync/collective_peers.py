"""Receivers in processes of their own, and what tests send them."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.collective import Sender
from counterflow.weight_sync.collective_receiver import Receiver
from counterflow.weight_sync.fingerprint import Fingerprints, by_group, fingerprint
from counterflow.weight_sync.group import Invitation
from counterflow.weight_sync.layout import Layout, NamedTensor

PROCESSES = multiprocessing.get_context("forkserver")
# Not our own modules: the server would look for them in the folder where the tests were started.
PROCESSES.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor"])

ANSWER_S = 120


def digest(tensors: Iterable[NamedTensor]) -> str:
    """A name for names, dtypes, shapes and bits."""
    seen = hashlib.sha256()
    for name, tensor in tensors:
        seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        seen.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def memory_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most since `reset_peak` (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def reset_peak() -> int:
    """Forget the peak of resident memory; returns what is resident, once groups that were closed are gone."""
    time.sleep(0.5)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


class Peer:
    """A receiver in its own process, which does what it is asked, one thing after the other."""

    def __init__(self, name: str, layout: Layout, device: str = "cpu") -> None:
        self.name = name
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(theirs, name, layout, device), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, verb: str, *arguments: Any) -> None:
        """Have it begin something."""
        self._pipe.send((verb, *arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """What came of it. Raises the error that it raised."""
        assert self._pipe.poll(timeout_s), f"{self.name} hangs"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self._process.pid
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kill the process."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join(ANSWER_S)
        self._pipe.close()


class Peers:
    """A sender's receivers."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.all: dict[str, Peer] = {}

    def start(self, *names: str) -> list[Peer]:
        """New receivers of these names, ready to be asked."""
        started = [Peer(name, self._layout) for name in names]
        for peer in started:
            peer.ask("holds")
        for peer in started:
            peer.answer()
        self.all |= {peer.name: peer for peer in started}
        return started

    def end(self, *names: str) -> None:
        """Kill these."""
        for name in names:
            self.all.pop(name).end()


def form(sender: Sender, peers: Sequence[Peer]) -> None:
    """Make a group of them."""
    invitation = sender.invite([peer.name for peer in peers])
    for peer in peers:
        peer.ask("join", invitation)
    sender.connect()
    for peer in peers:
        peer.answer()


def broadcast(sender: Sender, peers: Sequence[Peer], version: int, tensors: Iterable[NamedTensor]) -> list[str]:
    """Send a version to all of them; returns the digests of what they loaded."""
    for peer in peers:
        peer.ask("receive", version)
    sender.send(version, tensors)
    return [peer.answer() for peer in peers]


def _serve(pipe: Connection, name: str, layout: Layout, device: str) -> None:
    torch.set_num_threads(1)
    receiver = Receiver(name, layout, device)
    while True:
        try:
            verb, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send(globals()[f"_{verb}"](receiver, *arguments))
        except WeightSyncError as error:
            pipe.send(error)


def _join(receiver: Receiver, invitation: Invitation) -> None:
    receiver.join(invitation)


def _receive(receiver: Receiver, version: int, pause_s: float = 0.0, hangs_at: str = "") -> str:
    return digest(_loaded(receiver, version, pause_s, hangs_at))


def _fingerprints(receiver: Receiver, version: int, pause_s: float) -> Fingerprints:
    return by_group((name, fingerprint(tensor)) for name, tensor in _loaded(receiver, version, pause_s))


def _loaded(receiver: Receiver, version: int, pause_s: float, hangs_at: str = "") -> list[NamedTensor]:
    loaded = []

    def load(tensors: Iterator[NamedTensor]) -> None:
        for name, tensor in tensors:
            time.sleep(3600 if name == hangs_at else pause_s)
            loaded.append((name, tensor.clone()))

    receiver.receive(version, load)
    assert receiver.holds == version and not torch.distributed.is_initialized()
    return loaded


def _leave_at(receiver: Receiver, version: int, tensor_name: str) -> None:
    def load(tensors: Iterator[NamedTensor]) -> None:
        for name, _ in tensors:
            if name == tensor_name:
                receiver.close()

    receiver.receive(version, load)


def _fail_at(receiver: Receiver, version: int, tensor_name: str) -> None:
    def load(tensors: Iterator[NamedTensor]) -> None:
        for name, _ in tensors:
            if name == tensor_name:
                raise MemoryError("no room")

    receiver.receive(version, load)


def _close(receiver: Receiver) -> None:
    receiver.close()


def _holds(receiver: Receiver) -> int | None:
    return receiver.holds


def _peak_bytes(receiver: Receiver, invitation: Invitation, version: int) -> int:
    receiver.close()
    before = reset_peak()
    receiver.join(invitation)
    receiver.receive(version, lambda tensors: deque(tensors, maxlen=0))
    return memory_bytes("VmHWM") - before


def made_on_the_fly(count: int, elements: int, version: int) -> Iterator[NamedTensor]:
    """Tensors that are there only while they are asked for: float32 [elements]."""
    for i in range(count):
        yield f"tensor-{i}", torch.full((elements,), float(version + i))
