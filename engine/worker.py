"""What the gRPC shells of both roles share: submitting to the engine thread, state, and errors on the wire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import grpc

from kvferry.core import BlockCounts, CacheStatistics, InternalError, KVFerryError, TierCounts, UnavailableError, codec
from kvferry.engine.scheduler import BatchScheduler
from kvferry.engine.sequence import Sequence
from kvferry.engine.thread import EngineThread, EventStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineState:
    """What a worker reports once a second."""

    blocks: BlockCounts
    requests: dict[str, int]
    healthy: bool
    reason: str = ""
    cache: CacheStatistics = field(default_factory=CacheStatistics)
    tiers: tuple[TierCounts, ...] = ()


class EngineHost:
    """One scheduler on its engine thread, as its role's service sees it."""

    def __init__(self, name: str) -> None:
        self.thread = EngineThread(name)
        self._scheduler: BatchScheduler[Any] | None = None
        self._draining = False
        self._last_state = EngineState(BlockCounts(), {}, healthy=False, reason="starting")

    def start(self, scheduler: BatchScheduler[Any]) -> None:
        """Call on the running loop of the gRPC server."""
        self._scheduler = scheduler
        self.thread.post(scheduler.runner.pin)
        self.thread.start(scheduler, asyncio.get_running_loop())

    def drain(self) -> None:
        """Refuses new sequences from now on; running ones finish."""
        self._draining = True

    async def state(self, timeout_s: float = 2.0) -> EngineState:
        """Asked of the engine thread between two steps; the last known one when a step takes longer."""
        scheduler = self._scheduler
        if scheduler is None:
            return self._last_state
        if not self.thread.alive:
            return replace(self._last_state, healthy=False, reason="the engine thread died")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[EngineState] = loop.create_future()

        def ask() -> None:
            problem, manager = scheduler.problem, scheduler.manager
            state = EngineState(
                manager.counts(),
                scheduler.counts(),
                not problem,
                problem,
                manager.statistics(),
                manager.tier_counts(),
            )
            loop.call_soon_threadsafe(_answer, answer, state)

        self.thread.post(ask)
        try:
            async with asyncio.timeout(timeout_s):
                self._last_state = await answer
        except TimeoutError:
            logger.warning("the engine did not answer within %.1f s: a long step", timeout_s)
        return self._last_state

    @asynccontextmanager
    async def run(self, sequence: Sequence[Any], add: Callable[[], None]) -> AsyncIterator[EventStream]:
        """Adds a sequence and yields its events; leaving early cancels it."""
        if self._draining:
            raise UnavailableError("this worker is draining")
        if not self.thread.alive:
            raise UnavailableError("the engine of this worker is not running")
        stream = self.thread.subscribe(sequence.key)
        self.thread.post(lambda: self._add(sequence, add))
        try:
            yield stream
        finally:
            self.thread.unsubscribe(stream)
            self.thread.post(lambda: self._cancel(sequence.key))

    def _add(self, sequence: Sequence[Any], add: Callable[[], None]) -> None:
        try:
            add()
        except KVFerryError as error:
            self.thread.emit(sequence.key, error)

    def _cancel(self, key: int) -> None:
        assert self._scheduler is not None
        self._scheduler.cancel(key)

    def close(self) -> None:
        self.thread.close()


def _answer(answer: asyncio.Future[EngineState], state: EngineState) -> None:
    if not answer.done():  # whoever asked may have stopped waiting
        answer.set_result(state)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, request_id: str) -> NoReturn:
    """Ends a call with the error's status and its detail in the trailing metadata; no stack trace leaves."""
    if not isinstance(error, KVFerryError):
        logger.error("internal error", exc_info=error, extra={"request_id": request_id})
        error = InternalError(f"internal error; look for request {request_id} in the log")
    metadata = ((codec.ERROR_METADATA_KEY, codec.error_to_wire(error, request_id)),)
    await context.abort(getattr(grpc.StatusCode, error.code.name), error.message, metadata)
    raise AssertionError("unreachable: abort raises")
