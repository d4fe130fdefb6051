"""The learner's end of weight sync: copies a version out of the optimizer's way, then brings it to its receivers.

`stage` is all that the learner waits for; `prepare` and `send` run beside its next step. Weights flow from the model
into a slot, and from there over one transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from counterflow.weight_sync.fingerprint import Fingerprints, by_group, fingerprint
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.slots import Slots


@dataclass(frozen=True)
class StagedVersion:
    """A policy version that lies ready in a slot."""

    version: int
    slot: int


@dataclass(frozen=True)
class Shipment:
    """A staged version ready to travel: all that a receiver must know to load it."""

    version: int
    way: dict[str, Any]
    """How to get at the weights: plain data, `transport` among it."""


class Transport(Protocol):
    """The learner's end of one way to bring weights to engines."""

    def prepare(self, staged: StagedVersion, receivers: Sequence[str]) -> dict[str, Any]:
        """Make ready for these receivers; returns the `way`, which they are told before `send`."""

    def send(self, staged: StagedVersion) -> None:
        """Bring the version to every receiver of the last `prepare`; returns when nothing is left to do here."""

    def close(self) -> None:
        """Let go of everything."""


class Publisher:
    """Stages versions of one model and ships them.

    Args:
        ranks: receivers of each actor: as many as its engine has ranks.
    """

    def __init__(self, slots: Slots, transport: Transport, ranks: int = 1) -> None:
        self._slots, self._transport, self._ranks = slots, transport, ranks
        self._published: tuple[StagedVersion, Fingerprints] | None = None

    @property
    def layout(self) -> Layout:
        """How a version lies in a slot."""
        return self._slots.layout

    def stage(self, version: int, slot: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedVersion:
        """Copy the tensors, in the order of the layout, into `slot`.

        Raises:
            WeightSyncError: they are not those of the layout.
        """
        staged = StagedVersion(version, slot)
        if self._published and self._published[0] == staged:
            self._published = None
        self._slots.fill(slot, tensors)
        return staged

    def prepare(self, staged: StagedVersion, actors: Sequence[str]) -> Shipment:
        """Make the transport ready to bring a staged version to these actors.

        Raises:
            WeightSyncError: the transport cannot.
        """
        receivers = [receiver for actor in actors for receiver in receivers_of(actor, self._ranks)]
        return Shipment(staged.version, self._transport.prepare(staged, receivers))

    def send(self, staged: StagedVersion) -> Fingerprints:
        """Bring a prepared version to its receivers, while they load it; returns what they must hold then.

        Raises:
            WeightSyncError: it did not reach all of them; names those at fault where they are known.
        """
        self._transport.send(staged)
        if self._published and self._published[0] == staged:
            # Those of the first try: the slot may have been spoilt since.
            return self._published[1]
        tensors = self._slots.tensors(staged.slot)
        found = by_group((name, fingerprint(tensor)) for name, tensor in tensors)
        self._published = staged, found
        return found

    def close(self) -> None:
        """Let go of the transport and the slots."""
        self._transport.close()
        self._slots.close()


def receivers_of(actor: str, ranks: int) -> Iterator[str]:
    """The names of an actor's receivers, one for each rank of its engine."""
    return (f"{actor}/{rank}" for rank in range(ranks))


def actor_of(receiver: str) -> str:
    """The actor that a receiver belongs to."""
    return receiver.rpartition("/")[0]
