"""The engines' ends of the transports: where a rank gets the tensors of a version from. Each meets `Source`.

Imports nothing of vLLM: what is done with the tensors is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from counterflow.errors import WeightSyncError
from counterflow.weight_sync.adapter import Merger
from counterflow.weight_sync.collective_receiver import Load, Receiver
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.group import Invitation
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.slots import map_slot


class Source(Protocol):
    """One rank's end of a transport."""

    def receive(self, way: dict[str, Any], version: int, load: Load) -> None:
        """Have `load` take every tensor of a version, in the layout's order.

        Raises:
            WeightSyncError: it did not arrive whole.
        """

    def close(self) -> None:
        """Let go of everything."""


class SharedMemorySource:
    """Maps the learner's slot while a version is loaded."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def receive(self, way: dict[str, Any], version: int, load: Load) -> None:
        """Hand on views of the slot, mapped anew: what a loader wrote into the last ones is gone."""
        load(self._layout.views(map_slot(way["path"], self._layout.total_bytes)))

    def close(self) -> None:
        """Nothing is held."""


class BroadcastSource:
    """Takes part in the learner's broadcasts, joining a group when it is invited to another."""

    def __init__(self, name: str, layout: Layout, device: str) -> None:
        self._receiver = Receiver(name, layout, device)
        self._joined: Invitation | None = None

    def receive(self, way: dict[str, Any], version: int, load: Load) -> None:
        """Hand on copies: the buckets are filled again while an engine still keeps what it was given."""
        invitation = Invitation.from_dict(way["invitation"])
        if invitation != self._joined:
            self._joined = None
            self._receiver.join(invitation)
            self._joined = invitation
        try:
            self._receiver.receive(version, lambda tensors: load((name, tensor.clone()) for name, tensor in tensors))
        except WeightSyncError:
            self._joined = None
            raise

    def close(self) -> None:
        """Leave the group."""
        self._receiver.close()


class DiskSource:
    """Reads safetensors files."""

    def __init__(self, device: str) -> None:
        self._device = device

    def receive(self, way: dict[str, Any], version: int, load: Load) -> None:
        """Hand on the file's tensors, read one by one."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(way["path"], "pt", device=self._device) as file:
                found = (file.metadata() or {}).get("policy_version")
                if found != str(version):
                    raise WeightSyncError(f"{way['path']} holds policy version {found}, not {version}")
                load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"{way['path']} cannot be read here ({error}): weight_sync.folder must be a folder that the learner "
                "and every actor see"
            ) from error

    def close(self) -> None:
        """Nothing is held."""


class Intake:
    """One rank's end of every transport: whichever way a version comes, its whole weights reach the engine.

    Args:
        receiver: the rank's name.
        device: the rank's own, as `cuda:0`.

    Raises:
        WeightSyncError: an adapter is to come, and the base of it here is another than the learner's.
    """

    def __init__(self, receiver: str, layout: Layout, device: str) -> None:
        self._receiver, self._layout, self._device = receiver, layout, device
        self._merger = None if layout.adapter is None else Merger(layout.adapter, device)
        self._source: tuple[str, Source] | None = None

    def receive(self, way: dict[str, Any], version: int, load: Load) -> None:
        """Have `load` take every tensor of the engine's model, an adapter merged. Raises what `Source.receive` does."""
        source = self._open(way["transport"])
        if self._merger is None:
            source.receive(way, version, load)
        else:
            source.receive(way, version, self._merger.arrive)
            self._merger.load(load)

    def received(self, held: Fingerprints, *, whole: bool) -> Fingerprints:
        """Fingerprints of what arrived. Of an adapter they are once the model is seen to hold what was merged.

        Args:
            held: what the engine holds.
            whole: whether that is all of every tensor.
        """
        return held if self._merger is None else self._merger.vouch(held, whole=whole)

    def close(self) -> None:
        """Let go of the source, if there is one."""
        if self._source is not None:
            self._source[1].close()
            self._source = None

    def _open(self, transport: str) -> Source:
        if self._source is None or self._source[0] != transport:
            self.close()
            self._source = transport, open_source(transport, self._receiver, self._layout, self._device)
        return self._source[1]


def open_source(transport: str, receiver: str, layout: Layout, device: str) -> Source:
    """The engine's end of a transport.

    Args:
        device: the rank's own, as `cuda:0`.
    """
    makers: dict[str, Callable[[], Source]] = {
        "shared_memory": lambda: SharedMemorySource(layout),
        "gloo": lambda: BroadcastSource(receiver, layout, "cpu"),
        "nccl": lambda: BroadcastSource(receiver, layout, device),
        "disk": lambda: DiskSource(device),
    }
    return makers[transport]()
