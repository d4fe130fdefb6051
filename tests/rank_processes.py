"""Real processes as the ranks of a learner, over gloo."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore

from counterflow.configs.schema import RunConfig
from counterflow.learner.ranks import enter


def in_processes(config: RunConfig, job: Callable[..., Any], *args: Any) -> Any:
    """What `job(rank, *args)` returns on rank 0 of `config.learner.ranks` processes; numpy arrays, or plain data."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A server that has imported everything makes each of them in a moment.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["counterflow.learner.ranks"])
    answers = context.Queue()
    processes = [
        context.Process(target=_work, args=(config, number, port, answers, job, args), daemon=True)
        for number in range(config.learner.ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(_next_answer(answers, processes) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=20)
            if process.is_alive():
                process.terminate()
    failed = [told for done, told in found.values() if not done]
    assert not failed, "\n".join(failed)
    return found[0][1]


def _work(config: RunConfig, number: int, port: int, answers: Any, job: Callable[..., Any], args: Any) -> None:
    try:
        enter(config, number, TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False))
        found = job(number, *args)
        answers.put((number, (True, found if number == 0 else None)))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception:
        answers.put((number, (False, traceback.format_exc())))


def _next_answer(answers: Any, processes: list[Any]) -> tuple[int, Any]:
    while True:
        try:
            return answers.get(timeout=2)
        except queue.Empty:
            dead = [p.exitcode for p in processes if p.exitcode]
            assert not dead, f"a rank ended with exit code {dead[0]}, with no answer"
