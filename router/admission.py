"""Admission: a bounded number of requests inside, a bounded queue before it, never an unbounded wait."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvferry.core import OverloadedError

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
_SMOOTHING = 0.2


class Gate:
    """First come, first served. `limit` is asked whenever a place may have become free.

    name and setting word the errors: what is full, and what to raise.
    """

    def __init__(self, name: str, setting: str, limit: Callable[[], int], max_queued: int) -> None:
        self._name = name
        self._setting = setting
        self._limit = limit
        self._max_queued = max_queued
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._inside_s = 0.0  # smoothed stay of a request, for the retry hint
        self.running = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, timeout_s: float) -> AsyncIterator[None]:
        """Raises OverloadedError when the queue is full, or no place became free within `timeout_s`."""
        await self._enter(timeout_s)
        loop = asyncio.get_running_loop()
        entered = loop.time()
        try:
            yield
        finally:
            self.running -= 1
            self._inside_s += _SMOOTHING * (loop.time() - entered - self._inside_s)
            self.admit()

    def admit(self) -> None:
        """Lets in as many of the queue as the limit allows. Call when the limit may have risen."""
        while self._waiting and self.running < self._limit():
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                self.running += 1
                waiter.set_result(None)

    async def _enter(self, timeout_s: float) -> None:
        if not self._waiting and self.running < self._limit():
            self.running += 1
            return
        if len(self._waiting) >= self._max_queued:
            raise self._overloaded(f"{self._name} is full: {self.running} requests running, {self.queued} waiting")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            # Not wait_for: it swallows a cancellation that arrives in the moment the place is granted.
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            self._withdraw(waiter)
            raise self._overloaded(f"no place in {self._name} became free within {timeout_s:.1f} s") from None
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: asyncio.Future[None]) -> None:
        self._waiting.pop(waiter, None)
        if waiter.done() and not waiter.cancelled():  # it was let in at the same moment
            self.running -= 1
            self.admit()

    def _overloaded(self, what: str) -> OverloadedError:
        ahead = (self.queued + 1) / max(1, self._limit())
        hint = min(_MAX_RETRY_S, max(_MIN_RETRY_S, round(ahead * self._inside_s, 1)))
        return OverloadedError(f"{what}; try again, or raise {self._setting}", retry_after_s=hint)
