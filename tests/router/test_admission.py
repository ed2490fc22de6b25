from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvferry.core import OverloadedError
from kvferry.router.admission import Gate


def gate(limit: int, max_queued: int = 10) -> Gate:
    return Gate("the queue", "router.max_queued", lambda: limit, max_queued)


async def test_first_come_first_served() -> None:
    entrance = gate(1)
    order: list[int] = []

    async def visit(number: int) -> None:
        async with entrance.place(5):
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(visit(number) for number in range(6)))
    assert order == [0, 1, 2, 3, 4, 5]
    assert (entrance.running, entrance.queued) == (0, 0)


async def test_full_queue_and_long_wait_are_refused() -> None:
    entrance = gate(1, max_queued=1)
    async with entrance.place(5):
        waiting = asyncio.create_task(_enter(entrance, 0.05))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 requests running, 1 waiting; try again, or raise"):
            await _enter(entrance, 5)
        with pytest.raises(OverloadedError, match=r"within 0\.1 s") as caught:
            await waiting
        assert caught.value.retry_after_s >= 1
        assert entrance.queued == 0


async def test_cancelled_waiters_lose_their_turn_and_no_place() -> None:
    """Also when the cancellation comes in the moment the place is granted."""
    entrance = gate(1)
    for when in ("waiting", "granted"):
        async with entrance.place(5):
            waiting = [asyncio.create_task(_enter(entrance, 5)) for _ in range(3)]
            await asyncio.sleep(0)
            if when == "waiting":
                for task in waiting:
                    task.cancel()
        for task in waiting:
            task.cancel()
        for task in waiting:
            with suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
        assert (entrance.running, entrance.queued) == (0, 0)


async def test_raised_limit_lets_the_waiting_in() -> None:
    limit = 0
    entrance = Gate("the queue", "s", lambda: limit, 10)
    waiting = asyncio.create_task(_enter(entrance, 5))
    await asyncio.sleep(0)
    entrance.admit()
    await asyncio.sleep(0)
    assert not waiting.done()
    limit = 1
    entrance.admit()
    await asyncio.wait_for(waiting, 1)


async def _enter(entrance: Gate, timeout_s: float) -> None:
    async with entrance.place(timeout_s):
        pass
