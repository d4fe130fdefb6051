"""Additions that travel together: each gets its own answer, and no more than is allowed goes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.buffer.flush import Flush


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=40), st.integers(1, 12))
def test_items_are_lost_doubled_reordered_or_too_many(items: list[tuple[int, int]], most: int) -> None:
    sent: list[list[tuple[int, int]]] = []

    async def send(batch: Sequence[tuple[int, int]]) -> list[bool]:
        sent.append(list(batch))
        await asyncio.sleep(0)
        return [index % 2 == 0 for index, _ in batch]

    async def main() -> None:
        flush = Flush(send, lambda item: item[1], most)

        async def add(index: int, size: int, pauses: int) -> bool:
            for _ in range(pauses):
                await asyncio.sleep(0)
            return await flush.add((index, size))

        answers = await asyncio.gather(*(add(i, size, pauses) for i, (size, pauses) in enumerate(items)))
        assert answers == [i % 2 == 0 for i in range(len(items))]

    asyncio.run(main())
    assert sorted(item for batch in sent for item in batch) == [(i, size) for i, (size, _) in enumerate(items)]
    assert all(len(batch) == 1 or sum(size for _, size in batch) <= most for batch in sent)


def test_each_item_travels_alone() -> None:
    sent: list[list[int]] = []

    async def send(batch: Sequence[int]) -> list[bool]:
        sent.append(list(batch))
        await asyncio.sleep(0.01)
        return [True] * len(batch)

    async def main() -> None:
        flush = Flush(send, lambda _: 1, 100)
        first = asyncio.create_task(flush.add(0))
        await asyncio.sleep(0.005)
        await asyncio.gather(first, *(flush.add(i) for i in range(1, 9)))

    asyncio.run(main())
    assert sent == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_failure_reaches_other_batches_or_nobody() -> None:
    async def send(batch: Sequence[int]) -> list[bool]:
        await asyncio.sleep(0)
        if 0 in batch:
            raise ValueError("refused")
        return [True] * len(batch)

    async def main() -> None:
        flush = Flush(send, lambda _: 1, 2)
        answers = await asyncio.gather(*(flush.add(i) for i in range(4)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ValueError, ValueError, bool, bool]
        assert await flush.add(5)

    asyncio.run(main())


def test_closing_leaves_somebody_waiting() -> None:
    async def never(batch: Sequence[int]) -> list[bool]:
        await asyncio.Event().wait()
        return []

    async def main() -> None:
        flush = Flush(never, lambda _: 1, 1)
        adds = [asyncio.create_task(flush.add(i)) for i in range(3)]
        await asyncio.sleep(0)
        await flush.close()
        answers = await asyncio.gather(*adds, return_exceptions=True)
        assert [type(answer) for answer in answers] == [asyncio.CancelledError] * 3

    asyncio.run(main())


def test_adder_that_gave_up_spoils_its_batch() -> None:
    async def send(batch: Sequence[int]) -> list[bool]:
        await asyncio.sleep(0.01)
        return [True] * len(batch)

    async def main() -> None:
        flush = Flush(send, lambda _: 1, 10)
        adds = [asyncio.create_task(flush.add(i)) for i in range(3)]
        await asyncio.sleep(0.001)
        adds[1].cancel()
        assert await adds[0] and await adds[2]
        with pytest.raises(asyncio.CancelledError):
            await adds[1]

    asyncio.run(main())
