"""Processes and the cores they run on: shares of this machine's cores, pinning, and an end without orphans."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

WATCH_PARENT_VARIABLE = "COUNTERFLOW_WATCH_PARENT"


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


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP act as Ctrl-C does, so that one way of ending serves all. Only in the main thread."""

    def interrupt(number: int, frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """SIGINT waits until the end of the context, and children started inside never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch_parent() -> None:
    """End this process soon after its parent ends, where `COUNTERFLOW_WATCH_PARENT` is set.

    vLLM calls this in each of its processes, as a general plugin: an engine must not outlive its actor.
    """
    if not os.environ.get(WATCH_PARENT_VARIABLE) or any(t.name == WATCH_PARENT_VARIABLE for t in threading.enumerate()):
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name=WATCH_PARENT_VARIABLE, daemon=True).start()


def descendants() -> set[psutil.Process]:
    """All processes below this one, now."""
    with suppress(psutil.Error):
        return set(psutil.Process().children(recursive=True))
    return set()


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files of Python's shared memory and semaphores that these processes have mapped. Empty outside Linux."""
    found = set()
    for process in processes:
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = Path(line.rpartition(" ")[2])
                if path.parent == Path("/dev/shm") and path.name.startswith(("psm_", "sem.mp-")):
                    found.add(path)
    return found


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
