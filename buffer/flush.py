"""Additions that wait for each other: those that come while one is on its way travel together in the next.

A server that syncs its log with each write syncs once for all of them. Knows asyncio and nothing of the server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Flush(Generic[T]):
    """Gathers items and has them sent, one batch at a time.

    Args:
        send: sends a batch; returns an answer for each item.
        size: of an item, in bytes.
        most_bytes: a batch is no larger, unless it is a single item.
    """

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[bool]]], size: Callable[[T], int], most_bytes: int
    ) -> None:
        self._send, self._size, self._most_bytes = send, size, most_bytes
        self._waiting: deque[tuple[T, asyncio.Future[bool]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def add(self, item: T) -> bool:
        """Send an item with others; its answer. Raises what the sending of its batch raised."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await answer

    async def close(self) -> None:
        """Give up what has not been sent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        # Cancelled before it began, the task has settled nothing.
        while self._waiting:
            self._waiting.popleft()[1].cancel()

    async def _run(self) -> None:
        while self._waiting:
            batch = self._next()
            try:
                answers = await self._send([item for item, _ in batch])
                if len(answers) != len(batch):
                    raise RuntimeError(f"{len(answers)} answers to {len(batch)} items")
            except BaseException as error:
                for _, answer in batch:
                    _settle(answer, error)
                if not isinstance(error, Exception):
                    raise
            else:
                for (_, answer), found in zip(batch, answers, strict=True):
                    if not answer.done():
                        answer.set_result(found)

    def _next(self) -> list[tuple[T, asyncio.Future[bool]]]:
        batch = [self._waiting.popleft()]
        size = self._size(batch[0][0])
        while self._waiting and (size := size + self._size(self._waiting[0][0])) <= self._most_bytes:
            batch.append(self._waiting.popleft())
        return batch


def _settle(answer: asyncio.Future[bool], error: BaseException) -> None:
    if answer.done():
        return
    if isinstance(error, asyncio.CancelledError):
        answer.cancel()
    else:
        answer.set_exception(error)
