"""Processes and the cores they run on: shares of this machine's cores, pinning, and an end without orphans."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil


def usable_cores() -> list[int]:
    """The cores that this process may use; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_cores(wanted: Sequence[int], cores: Sequence[int]) -> list[list[int]] | None:
    """Cores for each of several processes that want so many, none twice; None where there are too few."""
    if sum(wanted) > len(cores):
        return None
    shares, at = [], 0
    for count in wanted:
        shares.append(list(cores[at : at + count]))
        at += count
    return shares


def pin(cores: Sequence[int]) -> None:
    """Keep every thread of this process, and all it will start, on these cores. Does nothing outside Linux."""
    threads = Path("/proc/self/task")
    if not hasattr(os, "sched_setaffinity") or not threads.is_dir():
        return
    for thread in threads.iterdir():
        with suppress(ProcessLookupError):  # A thread may end while we walk.
            os.sched_setaffinity(int(thread.name), cores)


def descendants() -> set[psutil.Process]:
    """All processes below this one, now."""
    with suppress(psutil.Error):
        return set(psutil.Process().children(recursive=True))
    return set()


def end(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """See that these processes end: ask, wait at most `grace_s` seconds, then kill.

    Python's resource trackers come last and by themselves: each unlinks the shared memory that its dead left behind.
    """
    processes = list(processes)
    trackers = [p for p in processes if _is_resource_tracker(p)]
    _end([p for p in processes if p not in trackers], grace_s)
    psutil.wait_procs(trackers, timeout=grace_s)
    _end(trackers, grace_s)


def _end(processes: Sequence[psutil.Process], grace_s: float) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)


def _is_resource_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    return False
