"""The learner's end of weight sync by broadcast: one sender, for any number of receivers in processes of their own.

A version streams through two buckets: one is filled while the other is on its way. Receivers acknowledge what they
loaded; a group in which one died or refused is over, and the next is made without it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.buckets import Header, checksum, fingerprint, largest_bytes, packed, plan
from counterflow.weight_sync.group import Broken, Group, Invitation, open_store
from counterflow.weight_sync.layout import Layout, NamedTensor
from counterflow.weight_sync.lines import Lines, describe

_MOST_GRACE_S = 2.0
_LISTEN_S = 0.1


def gathered(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """The tensors, each gathered from its shards when it is asked for.

    A collective of the learner's ranks: the first sends them, `sender.send(version, gathered(...))`, the others only
    take part, `for _ in gathered(...): pass`.
    """
    for name, tensor in tensors:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Sender:
    """Broadcasts versions of one model to the receivers that it invited last.

    Args:
        layout: the tensors, in order, with the dtypes in which they travel.
        bucket_bytes: the most that travels at once; two buckets of this size are held.
        host: address of this process that receivers can reach.
        backend: `gloo` for buckets in memory, `nccl` for buckets on a GPU.
        timeout_s: longest wait for the group to form, for a bucket to move, or for receivers to load the last buckets.
        device: where the buckets lie, and with NCCL the GPU.
    """

    def __init__(
        self,
        layout: Layout,
        bucket_bytes: int,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        timeout_s: float = 60.0,
        device: str = "cpu",
    ) -> None:
        self._buckets = plan(layout, bucket_bytes)
        self._host, self._backend, self._bucket_bytes, self._device = host, backend, bucket_bytes, device
        self._timeout_s = timeout_s
        self._grace_s = min(timeout_s / 4, _MOST_GRACE_S)
        self._generation = 0
        self._invitation: Invitation | None = None
        self._store: TCPStore | None = None
        self._lines: Lines | None = None
        self._group: Group | None = None
        self._newest = -1
        self._sent = -1

    def invite(self, receivers: Sequence[str]) -> Invitation:
        """Open the next generation, for these receivers; the one before is over.

        Give each the invitation, and call `connect` while they join.

        Raises:
            WeightSyncError: nobody can call at this host.
        """
        if not receivers or len(set(receivers)) != len(receivers):
            raise ValueError(f"receivers must be one or more different names, not {list(receivers)}")
        self.close()
        self._generation += 1
        self._sent = -1
        try:
            self._lines = Lines(self._host, receivers, self._generation, fingerprint(self._buckets), self._timeout_s)
            self._store = open_store(self._lines.host, self._timeout_s)
        except (OSError, RuntimeError) as error:
            raise self._over(
                f"the sender cannot listen on {self._host!r} ({error}): set weight_sync.host to an address of the "
                "learner's host"
            ) from error
        self._invitation = Invitation(
            self._lines.host,
            self._lines.port,
            self._store.port,
            self._generation,
            tuple(receivers),
            self._backend,
            self._bucket_bytes,
            self._timeout_s,
        )
        return self._invitation

    def connect(self) -> None:
        """Return when every receiver has joined.

        Raises:
            WeightSyncError: one did not; names it. The generation is over.
        """
        if self._invitation is None or self._lines is None or self._store is None:
            raise WeightSyncError("nobody is invited: call invite first")
        try:
            # Ends before receivers lose patience, so that they are told who is missing.
            self._lines.gather(self._timeout_s - self._grace_s)
            self._lines.tell("go")
            self._group = Group(
                self._invitation,
                self._store,
                0,
                self._lines.host,
                self._device,
                largest_bytes(self._buckets),
                self._listen,
            )
        except (WeightSyncError, Broken) as error:
            if not self._lines.missing:
                self._await_word(self._lines)
            at_fault = self._lines.at_fault
            reason = describe(self._lines.reports, at_fault) or str(error)
            raise self._over(
                f"generation {self._generation} did not form: {reason}", at_fault or self._lines.missing
            ) from error

    def send(self, version: int, tensors: Iterable[NamedTensor]) -> None:
        """Broadcast a version; return when every receiver has loaded it.

        `tensors` are those of the layout, in its order, and may be made or gathered while they are asked for. They are
        asked for to the end even where sending failed, so that no other rank is left in a gather.

        Raises:
            WeightSyncError: a receiver died, left, refused or said no more: its name is in the error. The generation is
                over; `invite` the others to the next and send the same version, or a newer one.
        """
        source = iter(tensors)
        try:
            self._send(version, source)
        except Exception:
            deque(source, maxlen=0)
            raise

    def close(self) -> None:
        """End the generation. Receivers that still wait are told."""
        if self._lines is not None:
            self._lines.tell("the sender closed the group")
        self._let_go()

    def _send(self, version: int, source: Iterator[NamedTensor]) -> None:
        if self._group is None:
            raise WeightSyncError(f"version {version} has no group to go to: call invite and connect first")
        if version < self._newest or version <= self._sent:
            raise WeightSyncError(f"version {version} cannot follow version {max(self._newest, self._sent)}")
        self._newest = self._sent = version
        try:
            self._stream(version, source, self._group)
            self._await_load(version)
        except Broken as error:
            raise self._blame(version, str(error)) from error
        except BaseException:
            self._over(f"version {version} was not sent to its end")
            raise

    def _stream(self, version: int, source: Iterator[NamedTensor], group: Group) -> None:
        on_their_way: deque[list[dist.Work]] = deque()

        def free() -> Iterator[torch.Tensor]:
            for buffer in cycle(group.buffers):
                if len(on_their_way) == len(group.buffers):
                    self._finish(on_their_way.popleft(), group)
                yield buffer

        self._listen(0)
        for bucket, payload in packed(self._buckets, source, free()):
            header = Header(
                self._generation, version, bucket.index, len(self._buckets), bucket.size_bytes, checksum(payload)
            )
            on_their_way.append(self._transmit(header, payload, group))
        while on_their_way:
            self._finish(on_their_way.popleft(), group)

    def _transmit(self, header: Header, payload: torch.Tensor, group: Group) -> list[dist.Work]:
        works = [group.broadcast(header.encode().to(payload.device))]
        return [*works, group.broadcast(payload)] if header.size_bytes else works

    def _finish(self, works: list[dist.Work], group: Group) -> None:
        for work in works:
            group.finish(work, self._listen, self._timeout_s - self._grace_s)

    def _await_load(self, version: int) -> None:
        deadline = time.monotonic() + self._timeout_s - self._grace_s
        while behind := self._behind(version):
            if time.monotonic() > deadline:
                raise Broken(f"{', '.join(behind)} did not finish loading for {self._timeout_s - self._grace_s:g} s")
            self._listen(_LISTEN_S)

    def _listen(self, pause_s: float) -> None:
        assert self._lines is not None
        self._lines.listen(pause_s)
        # Who has loaded the version may go: it is the next version's loss.
        if lost := [name for name in self._lines.gone if not self._holds(name, self._sent)]:
            raise Broken(describe(self._lines.reports, lost))

    def _behind(self, version: int) -> list[str]:
        assert self._lines is not None
        return [name for name in self._lines.reports if not self._holds(name, version)]

    def _holds(self, name: str, version: int) -> bool:
        assert self._lines is not None
        report = self._lines.reports[name]
        return (report.version, report.buckets) == (version, len(self._buckets))

    def _blame(self, version: int, reason: str) -> WeightSyncError:
        """End the generation, and find out who is at fault: who is gone on its own account, else who says nothing."""
        assert self._lines is not None
        lines = self._lines
        lines.tell(f"version {version} did not get through to every receiver ({reason})")
        deadline = time.monotonic() + self._grace_s
        while (silent := set(self._behind(version)) - set(lines.gone)) and (left := deadline - time.monotonic()) > 0:
            lines.listen(min(left, _LISTEN_S))
            if lines.at_fault:
                # Others that died with it are heard of at once; those that load a bucket are not worth the wait.
                deadline = min(deadline, time.monotonic() + _LISTEN_S)
        named = [name for name in lines.at_fault if not self._holds(name, version)] or sorted(silent)
        loaded = [report.buckets for name in named if (report := lines.reports[name]).version == version]
        return self._over(
            f"version {version} stopped at bucket {min(loaded, default=0)} of {len(self._buckets)} in generation "
            f"{self._generation}: {describe(lines.reports, named) or reason}. "
            "Invite the other receivers to a new group and send again",
            named,
        )

    def _await_word(self, lines: Lines) -> None:
        """Hear who broke the group: its connections to others may be missed a moment before its line."""
        deadline = time.monotonic() + self._grace_s
        while not lines.at_fault and set(lines.reports) - set(lines.gone) and (left := deadline - time.monotonic()) > 0:
            lines.listen(min(left, _LISTEN_S))

    def _over(self, reason: str, receivers: Iterable[str] = ()) -> WeightSyncError:
        if self._lines is not None:
            self._lines.tell(reason)
        self._let_go()
        return WeightSyncError(reason, receivers)

    def _let_go(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._lines is not None:
            self._lines.close()
        self._group = self._lines = self._store = self._invitation = None
