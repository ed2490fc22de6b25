"""The engine thread, and its bridge to the asyncio loop of the gRPC server.

The scheduler runs on a thread of its own. Work reaches it through a mailbox drained between steps; what a
step produced reaches the loop in one wake-up, however many requests it served.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from kvferry.core import KVFerryError, UnavailableError

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""How long a thread with blocked work sleeps; every event that could unblock it wakes it earlier."""


class Steppable(Protocol):
    def step(self) -> bool: ...

    def close(self) -> None: ...

    @property
    def has_work(self) -> bool: ...


class EventStream:
    """The events of one sequence, for one consumer on the loop. Ends with an error raised, or `close`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[object] = asyncio.Queue()
        self.key: int | None = None

    def put(self, event: object) -> None:
        self._queue.put_nowait(event)

    async def get(self) -> Any:
        """The next event; a KVFerryError is raised instead of returned."""
        event = await self._queue.get()
        if isinstance(event, KVFerryError):
            raise event
        return event

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            yield await self.get()


class EngineThread:
    """Owns the thread. `post` and `close` may be called from any thread; the rest from the loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._mailbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outbox: list[tuple[int, object]] = []
        self._streams: dict[int, EventStream] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduler: Steppable | None = None

    def start(self, scheduler: Steppable, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduler, self._loop = scheduler, loop
        self._thread = threading.Thread(target=self._run, name=f"engine-{self._name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def post(self, action: Callable[[], None]) -> None:
        """Runs `action` on the engine thread between steps, in order."""
        with self._wake:
            self._mailbox.append(action)
            self._wake.notify()

    def emit(self, key: int, event: object) -> None:
        """For the scheduler: an event of sequence `key`, delivered after the step."""
        self._outbox.append((key, event))

    def subscribe(self, key: int) -> EventStream:
        """Call before the sequence is added; `unsubscribe` when done."""
        stream = EventStream()
        stream.key = key
        self._streams[key] = stream
        return stream

    def unsubscribe(self, stream: EventStream) -> None:
        if stream.key is not None:
            self._streams.pop(stream.key, None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends every sequence and the thread. A step in progress is waited for, up to `timeout_s`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- on the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        try:
            while self._drain_mailbox():
                worked = scheduler.step()
                self._deliver()
                if not worked:
                    self._sleep(scheduler)
            scheduler.close()
        except Exception:
            logger.exception("the engine thread died; the worker reports unhealthy")
            for key in list(self._streams):
                self.emit(key, UnavailableError("the engine of this worker died; see its log"))
        finally:
            self._deliver()

    def _drain_mailbox(self) -> bool:
        """Runs what was posted; False when the thread is to stop."""
        while self._mailbox:
            self._mailbox.popleft()()
        return not self._stopping

    def _sleep(self, scheduler: Steppable) -> None:
        timeout_s = IDLE_WAIT_S if scheduler.has_work else None
        with self._wake:
            if not self._mailbox and not self._stopping:
                self._wake.wait(timeout_s)

    def _deliver(self) -> None:
        if not self._outbox or self._loop is None:
            return
        batch, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(self._dispatch, batch)
        except RuntimeError:  # the loop closed first: nobody is left to tell
            logger.debug("dropped %d events after the loop closed", len(batch))

    def _dispatch(self, batch: list[tuple[int, object]]) -> None:
        for key, event in batch:
            stream = self._streams.get(key)
            if stream is not None:
                stream.put(event)
