"""A thread that runs what is posted to it, and a step that says when it wants to run next."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

_AFTER_ERROR_S = 0.05


class Sleeper(ABC):
    """How a loop waits for its next turn."""

    @abstractmethod
    def sleep(self, seconds: float | None) -> None:
        """Until `wake` was called since the last sleep, or the time is over; None: until then only."""

    @abstractmethod
    def wake(self) -> None: ...


class EventSleeper(Sleeper):
    def __init__(self) -> None:
        self._event = threading.Event()

    def sleep(self, seconds: float | None) -> None:
        self._event.wait(seconds)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()


class Loop:
    """Sleeps whenever nothing is posted and the step wants nothing: an idle loop costs nothing.

    `step` returns the seconds until it wants to run again, None for not before something is posted.
    """

    def __init__(self, name: str, step: Callable[[], float | None], sleeper: Sleeper | None = None) -> None:
        self._step = step
        self._sleeper = sleeper or EventSleeper()
        self._jobs: deque[Callable[[], None]] = deque()
        self._closing = False
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Runs `job` on the loop's thread, in order of posting. Dropped once the loop is closed."""
        self._jobs.append(job)
        self._sleeper.wake()

    def wake(self) -> None:
        """Lets the step run now."""
        self._sleeper.wake()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after what was posted before; False when it did not end in time."""
        self._closing = True
        self._sleeper.wake()
        if not self._thread.ident or self.is_current:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s: float | None = None
        while self._next_turn(wait_s):
            while self._jobs:
                self._guard(self._jobs.popleft())
            wait_s = self._guard(self._step)

    def _next_turn(self, wait_s: float | None) -> bool:
        """Waits until there is something to do; False when the loop ends."""
        if not self._jobs and not self._closing and (wait_s is None or wait_s > 0):
            self._sleeper.sleep(wait_s)
        return bool(self._jobs) or not self._closing

    def _guard(self, job: Callable[[], float | None] | Callable[[], None]) -> float | None:
        """A bug in one job must not end the thread that everybody waits for."""
        try:
            return job()
        except Exception:
            self.errors += 1
            logger.exception("%s: unexpected error", self._thread.name)
            return _AFTER_ERROR_S
