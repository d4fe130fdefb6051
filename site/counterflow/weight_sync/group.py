"""A group: one sender and its receivers, joined for broadcasts by a process group of their own.

The sender invites, receivers join, and a group that broke is closed, never mended: each change of membership is a new
generation. The default process group of either process, which belongs to its trainer or engine, is not touched.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from counterflow.errors import WeightSyncError

Built = TypeVar("Built")
Listen = Callable[[float], None]

_PAUSE_S = 0.001
_SLICE = timedelta(milliseconds=20)


@dataclass(frozen=True)
class Invitation:
    """All that a receiver must know to join."""

    host: str
    line_port: int
    store_port: int
    generation: int
    receivers: tuple[str, ...]
    """Names, in the order of their ranks from 1 on."""
    backend: str
    bucket_bytes: int
    timeout_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for calls between processes."""
        return {**asdict(self), "receivers": list(self.receivers)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Invitation:
        """The invitation that `to_dict` wrote."""
        return cls(**{**data, "receivers": tuple(data["receivers"])})


class Broken(Exception):
    """A collective failed because of another member of the group."""


class Group:
    """The process group of one generation, with two buffers for what is on its way.

    Args:
        invitation: the sender's.
        store: a client of the sender's store; kept as long as the group.
        rank: 0 is the sender.
        host: this process's address, at which the others reach it.
        device: where the buckets lie.
        buffer_bytes: size of each of the two buffers.
        listen: is called while the others are awaited, and may raise.

    Raises:
        WeightSyncError: the others are not there within the invitation's `timeout_s`, or the backend is missing.
    """

    def __init__(
        self,
        invitation: Invitation,
        store: Store,
        rank: int,
        host: str,
        device: str,
        buffer_bytes: int,
        listen: Listen,
    ) -> None:
        self._store: Store | None = store
        self._wakes = invitation.backend == "gloo"
        size = len(invitation.receivers) + 1
        prefixed = PrefixStore(f"generation-{invitation.generation}", store)
        build = {"gloo": _gloo, "nccl": _nccl}[invitation.backend]
        self._backend: Any = within(
            invitation.timeout_s,
            f"process group of generation {invitation.generation}",
            lambda: build(prefixed, rank, size, host, torch.device(device), invitation.timeout_s),
            listen,
        )
        self.buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start to send `tensor` from rank 0 into everyone's. It must stay as it is until the work is finished.

        Raises:
            Broken: the group is no more.
        """
        try:
            work: dist.Work = self._backend.broadcast(tensor, 0)
        except RuntimeError as error:
            raise Broken(_gist(error)) from error
        return work

    def finish(self, work: dist.Work, listen: Listen, timeout_s: float) -> None:
        """Return when `work` is done here; `listen` is called meanwhile and may raise.

        Raises:
            Broken: it failed, or took longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_done(work):
            if time.monotonic() > deadline:
                raise Broken(f"nothing moved for {timeout_s:g} s")
            listen(0)
        try:
            work.wait()
        except RuntimeError as error:
            # Who ended the group has said why before it closed a connection.
            listen(0)
            raise Broken(_gist(error)) from error

    def _is_done(self, work: dist.Work) -> bool:
        if not work.is_completed():
            if self._wakes:
                with suppress(RuntimeError):
                    work.wait(_SLICE)
            else:
                # NCCL would abort the group at the end of a short wait.
                time.sleep(_PAUSE_S)
        return work.is_completed()

    def close(self) -> None:
        """Let go of the group. What is on its way is abandoned, with its buffers."""
        held = [self._backend, self._store]
        self._backend = self._store = None
        self.buffers = []
        # The last reference to a backend waits for what is pending, until the backend's own timeout at the latest. It
        # must be the thread's; and no daemon's, for which the interpreter would not wait but end the process in torch.
        threading.Thread(target=_take_down, args=(held,)).start()


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A store that listens on a free port of `host` alone: torch would listen on every address."""
    with socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]) as server:
        port = server.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=server.detach(),
        )


def reach_store(invitation: Invitation, listen: Listen) -> TCPStore:
    """A client of the sender's store.

    Raises:
        WeightSyncError: it does not answer within the invitation's `timeout_s`.
    """
    timeout = timedelta(seconds=invitation.timeout_s)
    return within(
        invitation.timeout_s,
        f"store at {invitation.host}:{invitation.store_port}",
        lambda: TCPStore(invitation.host, invitation.store_port, wait_for_workers=False, timeout=timeout),
        listen,
    )


def within(timeout_s: float, what: str, build: Callable[[], Built], listen: Listen) -> Built:
    """What `build` makes, in a thread that is left behind when it takes too long: torch may wait for ever in there.

    `listen` is called meanwhile, and may raise.

    Raises:
        WeightSyncError: it failed or took longer than `timeout_s`.
    """
    ended: Future[Built] = Future()

    def run() -> None:
        try:
            ended.set_result(build())
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not ended.done():
        if time.monotonic() > deadline:
            raise WeightSyncError(f"{what}: not there within {timeout_s:g} s")
        listen(_PAUSE_S)
    try:
        return ended.result()
    except WeightSyncError:
        raise
    except Exception as error:
        raise WeightSyncError(f"{what}: {_gist(error)}") from error


def _gloo(store: Store, rank: int, size: int, host: str, device: torch.device, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, host: str, device: torch.device, timeout_s: float) -> Any:
    if not dist.is_nccl_available():
        raise WeightSyncError("this torch was built without NCCL: use the gloo backend")
    options = dist.ProcessGroupNCCL.Options()
    # Ours is the deadline. At its own, torch's watchdog would end the process.
    options._timeout = timedelta(seconds=10 * timeout_s)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    # Connects now, under the caller's deadline, and not within the first broadcast.
    backend.eager_connect_single_device(device)
    return backend


def _take_down(held: list[Any]) -> None:
    with suppress(RuntimeError):
        held[0].abort()
        held[0].shutdown()
    held.clear()


def _gist(error: Exception) -> str:
    """What torch says, less its advice and its stack."""
    return str(error).partition("\n")[0].partition(". ")[0]
