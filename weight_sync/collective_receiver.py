"""An engine's end of weight sync by broadcast: takes versions bucket by bucket and hands on their tensors.

Each bucket is handed on after its place and its checksum were found right, while the next is on its way. A version that
fails halfway leaves the model with none, which the receiver says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import torch
import torch.distributed as dist

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.buckets import (
    Bucket,
    Header,
    checksum,
    fingerprint,
    largest_bytes,
    plan,
    unpacked,
)
from counterflow.weight_sync.group import Broken, Group, Invitation, reach_store
from counterflow.weight_sync.layout import Layout, NamedTensor
from counterflow.weight_sync.lines import Line, Report, State

Load = Callable[[Iterator[NamedTensor]], None]
"""Takes all tensors of a version."""


class Receiver:
    """Receives versions of one model.

    Args:
        name: how the sender calls it.
        layout: the sender's.
        device: where the buckets lie, and with NCCL the GPU.
    """

    def __init__(self, name: str, layout: Layout, device: str = "cpu") -> None:
        self.name, self._layout, self._device = name, layout, device
        self.holds: int | None = None
        """The version that was loaded to its end and not partly overwritten since."""
        self._newest = -1
        self._group: Group | None = None
        self._line: Line | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._generation = -1
        self._timeout_s = 0.0
        self._received_in_generation = False
        self._at = Report(State.JOINED)

    def join(self, invitation: Invitation) -> None:
        """Become a member of the invitation's group, leaving the one before. Returns when all have joined.

        Raises:
            WeightSyncError: the sender is not there, not ready in time or refuses.
        """
        self.close()
        if self.name not in invitation.receivers:
            raise WeightSyncError(f"{self.name} is not invited to generation {invitation.generation}")
        self._buckets = plan(self._layout, invitation.bucket_bytes)
        self._generation, self._timeout_s = invitation.generation, invitation.timeout_s
        self._received_in_generation = False
        self._at = Report(State.JOINED)
        self._line = Line(
            invitation.host,
            invitation.line_port,
            self.name,
            invitation.generation,
            fingerprint(self._buckets),
            invitation.timeout_s,
        )
        try:
            rank = invitation.receivers.index(self.name) + 1
            self._group = Group(
                invitation,
                reach_store(invitation, self._line.listen),
                rank,
                self._line.host,
                self._device,
                largest_bytes(self._buckets),
                self._line.listen,
            )
        except BaseException:
            self.close()
            raise

    def receive(self, version: int, load: Load) -> None:
        """Load a version.

        Args:
            version: the one that is expected.
            load: takes every name and tensor, in the layout's order and dtypes. A tensor may be a view of a bucket and
                overwritten once the next is asked for: copy what is to stay.

        Raises:
            WeightSyncError: it did not arrive whole, or `load` failed. What was loaded is of no version (`holds` is
                None); join the next generation.
        """
        if self._group is None or self._line is None:
            raise WeightSyncError(f"{self.name} is in no group: join one first")
        try:
            self._check_order(version)
            self.holds = None
            tensors = unpacked(self._received(version, self._group, self._line))
            load(tensors)
            if (left := next(tensors, None)) is not None:
                raise WeightSyncError(f"the loading ended before tensor {left[0]!r}")
        except Broken as error:
            reason = f"{self.name} lost version {version}: {error}"
            self._give_up(State.GAVE_UP, str(error))
            raise WeightSyncError(reason) from error
        except BaseException as error:
            self._give_up(State.REFUSED, str(error) or type(error).__name__)
            if isinstance(error, Exception):
                raise WeightSyncError(f"{self.name} refused version {version}: {error}", [self.name]) from error
            raise
        self.holds = self._newest = version
        self._received_in_generation = True
        self._at = Report(State.HOLDS, version, len(self._buckets))
        self._line.report(self._at)

    def close(self) -> None:
        """Leave the group."""
        self._give_up(State.LEFT, "")

    def _check_order(self, version: int) -> None:
        again = version == self._newest and self._received_in_generation
        if version < self._newest or again:
            raise WeightSyncError(f"version {self._newest} is here already")

    def _received(self, version: int, group: Group, line: Line) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Buckets and their bytes, checked; each is handed on while the next is on its way."""
        ahead: tuple[Header, Bucket, torch.Tensor] | None = None
        announced = self._announced(group)
        for bucket, buffer in zip(self._buckets, cycle(group.buffers), strict=False):
            group.finish(announced[1], self._listen, self._timeout_s)
            header = self._expected(version, bucket, Header.decode(announced[0]))
            payload = buffer[: bucket.size_bytes]
            work = group.broadcast(payload) if bucket.size_bytes else None
            if bucket.index + 1 < len(self._buckets):
                # Asked for now, the next header is here when this payload is.
                announced = self._announced(group)
            if ahead:
                yield self._checked(*ahead)
                self._at = Report(State.RECEIVING, version, bucket.index)
                line.report(self._at)
            if work:
                group.finish(work, self._listen, self._timeout_s)
            ahead = header, bucket, payload
        assert ahead is not None
        yield self._checked(*ahead)

    def _announced(self, group: Group) -> tuple[torch.Tensor, dist.Work]:
        raw = torch.empty(Header.SIZE_BYTES, dtype=torch.uint8, device=self._device)
        return raw, group.broadcast(raw)

    def _expected(self, version: int, bucket: Bucket, header: Header) -> Header:
        if header.generation != self._generation:
            raise WeightSyncError(f"a bucket of generation {header.generation} came in generation {self._generation}")
        if header.version != version:
            raise WeightSyncError(f"a bucket of version {header.version} came where version {version} was expected")
        if header.index != bucket.index:
            raise WeightSyncError(
                f"bucket {header.index} came where bucket {bucket.index} of {len(self._buckets)} was expected: "
                f"{'one was lost' if header.index > bucket.index else 'it came twice or too late'}"
            )
        if (header.count, header.size_bytes) != (len(self._buckets), bucket.size_bytes):
            raise WeightSyncError(
                f"bucket {bucket.index} is announced with another size than its place in the layout has"
            )
        return header

    def _checked(self, header: Header, bucket: Bucket, payload: torch.Tensor) -> tuple[Bucket, torch.Tensor]:
        if (found := checksum(payload)) != header.checksum:
            raise WeightSyncError(
                f"bucket {bucket.index} of {len(self._buckets)} is corrupted: its checksum is {found:08x}, "
                f"{header.checksum:08x} was sent"
            )
        return bucket, payload

    def _listen(self, pause_s: float) -> None:
        assert self._line is not None
        try:
            self._line.listen(pause_s)
        except WeightSyncError as error:
            raise Broken(str(error)) from error

    def _give_up(self, state: State, reason: str) -> None:
        if self._line is not None:
            self._line.report(replace(self._at, state=state, reason=reason))
            self._line.close()
        if self._group is not None:
            self._group.close()
        self._group = self._line = None
