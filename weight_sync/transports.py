"""The learner's ends of the transports: shared memory, broadcast by gloo or NCCL, and disk. Each meets `Transport`.

`open_publisher` makes the one that a configuration names, `settle` chooses where it leaves the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, WeightSyncError
from counterflow.weight_sync.collective import Sender
from counterflow.weight_sync.group import Invitation
from counterflow.weight_sync.layout import Layout
from counterflow.weight_sync.publisher import Publisher, StagedVersion, Transport
from counterflow.weight_sync.slots import Slots

BROADCASTS = ("gloo", "nccl")
"""Transports that bring a version to all receivers at once or to none."""

_KEPT_FILES = 2


def settle(config: RunConfig, one_host: bool, learner_host: str) -> RunConfig:
    """The configuration with transport and host as they will be.

    Args:
        one_host: whether learner and actors share a host.
        learner_host: address of the learner's host, for actors on others.

    Raises:
        ConfigError: the transport cannot reach every actor.
    """
    sync, gpus = config.weight_sync, bool(config.learner.gpus and config.actors.gpus)
    transport = sync.transport
    if transport == "auto":
        transport = "nccl" if gpus else "shared_memory" if one_host else "gloo"
    if transport == "shared_memory" and not one_host:
        raise ConfigError(
            "weight_sync.transport is shared_memory, but learner and actors are on several hosts: set gloo, nccl or "
            "disk"
        )
    if transport == "disk" and not one_host and sync.folder is None:
        raise ConfigError("weight_sync.folder is missing: a folder that all hosts see, for weight_sync.transport disk")
    host = sync.host or ("127.0.0.1" if one_host else learner_host)
    return config.replacing("weight_sync", transport=transport, host=host)


def open_publisher(config: RunConfig, layout: Layout, folder: Path) -> Publisher:
    """The learner's end of the transport that a configuration names; `auto`, where none was settled, is shared memory.

    Args:
        folder: the run folder.

    Raises:
        WeightSyncError: there is no room to stage versions.
    """
    sync = config.weight_sync
    device = "cuda" if sync.transport == "nccl" else "cpu"
    slots = Slots(layout, device)
    transport: Transport
    if sync.transport == "disk":
        transport = Disk(slots, sync.folder or folder / "weights")
    elif sync.transport in BROADCASTS:
        # The group forms, connects and moves a bucket, each in so long: before the callers of both ends lose patience.
        patience_s = sync.timeout_s / 3
        sender = Sender(layout, sync.bucket_bytes, sync.host or "127.0.0.1", sync.transport, patience_s, device)
        transport = Broadcast(slots, sender, sync.transport)
    else:
        transport = SharedMemory(slots)
    return Publisher(slots, transport, ranks=max(config.actors.gpus, 1))


class SharedMemory:
    """Receivers map the slot: nothing is sent."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def prepare(self, staged: StagedVersion, receivers: Sequence[str]) -> dict[str, Any]:
        """Say where the slot is."""
        return {"transport": "shared_memory", "path": self._slots.paths[staged.slot]}

    def send(self, staged: StagedVersion) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


class Broadcast:
    """Each version is broadcast once, bucket by bucket, to all receivers; a change among them makes a new group."""

    def __init__(self, slots: Slots, sender: Sender, backend: str) -> None:
        self._slots, self._sender, self._backend = slots, sender, backend
        self._invitation: Invitation | None = None
        self._connected = False
        self._sent: int | None = None

    def prepare(self, staged: StagedVersion, receivers: Sequence[str]) -> dict[str, Any]:
        """Invite the receivers, unless they are the members of a group that works and has not had this version."""
        if self._invitation is None or self._invitation.receivers != tuple(receivers) or self._sent == staged.version:
            self._invitation, self._connected, self._sent = self._sender.invite(receivers), False, None
        return {"transport": self._backend, "invitation": self._invitation.to_dict()}

    def send(self, staged: StagedVersion) -> None:
        """Wait for the group to form where it is new, then broadcast.

        Raises:
            WeightSyncError: names the receivers at fault; the group is over.
        """
        try:
            if not self._connected:
                self._sender.connect()
                self._connected = True
            self._sent = staged.version
            self._sender.send(staged.version, self._slots.tensors(staged.slot))
        except WeightSyncError:
            self._invitation = None
            raise

    def close(self) -> None:
        """End the group."""
        self._sender.close()


class Disk:
    """Versions are safetensors files in a folder that all hosts see, each written whole or not at all.

    Args:
        folder: made where it is missing. The newest versions stay in it.
    """

    def __init__(self, slots: Slots, folder: Path) -> None:
        self._slots, self._folder = slots, folder
        self._written: list[Path] = []

    def prepare(self, staged: StagedVersion, receivers: Sequence[str]) -> dict[str, Any]:
        """Write the version, anew where it is sent again: what is there may be why.

        Raises:
            WeightSyncError: it cannot be written.
        """
        path = self._folder.resolve() / f"version-{staged.version:08d}.safetensors"
        try:
            self._write(path, staged)
        except (OSError, SafetensorError) as error:
            _remove([path.with_suffix(".unfinished")])
            raise WeightSyncError(
                f"version {staged.version} cannot be written to {path} ({error}): make room or set weight_sync.folder"
            ) from error
        return {"transport": "disk", "path": str(path)}

    def send(self, staged: StagedVersion) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Remove what was written."""
        _remove(self._written)

    def _write(self, path: Path, staged: StagedVersion) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        save_file(
            {name: tensor.contiguous() for name, tensor in self._slots.tensors(staged.slot)},
            unfinished,
            {"policy_version": str(staged.version)},
        )
        unfinished.replace(path)
        if path not in self._written:
            self._written.append(path)
        _remove(self._written[:-_KEPT_FILES])
        self._written = self._written[-_KEPT_FILES:]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
