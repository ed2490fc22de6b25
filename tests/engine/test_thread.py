"""The engine thread and its bridge to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.core import RequestCancelledError, UnavailableError
from kvferry.engine import EngineThread


class Counter:
    """Emits `left` numbers for key 1, one per step."""

    def __init__(self, thread: EngineThread, left: int = 0) -> None:
        self.thread, self.left, self.closed, self.broken = thread, left, False, False
        self.threads: set[int] = set()

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> bool:
        if self.broken:
            raise RuntimeError("injected")
        self.threads.add(threading.get_ident())
        if not self.left:
            return False
        self.thread.emit(1, self.left)
        self.left -= 1
        return True

    def close(self) -> None:
        self.closed = True
        self.thread.emit(1, RequestCancelledError("closing"))


async def test_events_arrive_in_order_on_the_loop() -> None:
    thread = EngineThread("t")
    counter = Counter(thread)
    stream = thread.subscribe(1)
    thread.start(counter, asyncio.get_running_loop())
    thread.post(lambda: setattr(counter, "left", 3))
    assert [await asyncio.wait_for(stream.get(), 5) for _ in range(3)] == [3, 2, 1]
    assert threading.get_ident() not in counter.threads
    thread.close()
    with pytest.raises(RequestCancelledError):
        await asyncio.wait_for(stream.get(), 5)
    assert counter.closed
    assert not thread.alive


async def test_events_of_nobody_are_dropped() -> None:
    thread = EngineThread("t")
    stream = thread.subscribe(1)
    thread.unsubscribe(stream)
    other = thread.subscribe(2)
    thread.start(Counter(thread, 2), asyncio.get_running_loop())
    thread.post(lambda: thread.emit(2, "mine"))
    assert await asyncio.wait_for(other.get(), 5) == "mine"
    thread.close()


async def test_one_wake_up_delivers_everything_posted_before_it() -> None:
    thread = EngineThread("t")
    loop = asyncio.get_running_loop()
    wakes = 0
    original = loop.call_soon_threadsafe

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal wakes
        wakes += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
    streams = [thread.subscribe(key) for key in range(10, 60)]
    for key in range(10, 60):
        thread.post(lambda key=key: thread.emit(key, key))  # type: ignore[misc]
    thread.start(Counter(thread), loop)
    assert [await asyncio.wait_for(stream.get(), 5) for stream in streams] == list(range(10, 60))
    assert wakes == 1
    loop.call_soon_threadsafe = original  # type: ignore[method-assign]
    thread.close()


async def test_a_dead_engine_answers_everybody() -> None:
    thread = EngineThread("t")
    counter = Counter(thread)
    counter.broken = True
    stream = thread.subscribe(1)
    thread.start(counter, asyncio.get_running_loop())
    with pytest.raises(UnavailableError, match="died"):
        await asyncio.wait_for(stream.get(), 5)
    thread.close()  # waits for its last moments
    assert not thread.alive
