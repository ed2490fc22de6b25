"""A thread that runs what is posted to it, and a step that says when it wants to run next."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

_AFTER_ERROR_S = 0.05


class Loop:
    """Sleeps whenever nothing is posted and the step wants nothing: an idle loop costs nothing.

    `step` returns the seconds until it wants to run again, None for not before something is posted.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._step = step
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._woken = False
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Runs `job` on the loop's thread, in order of posting. Dropped once the loop is closed."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def wake(self) -> None:
        """Lets the step run now."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after what was posted before; False when it did not end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
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
        with self._changed:
            deadline = None if wait_s is None else time.monotonic() + wait_s
            while not (self._jobs or self._woken or self._closing):
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._woken = False
            return bool(self._jobs) or not self._closing

    def _guard(self, job: Callable[[], float | None] | Callable[[], None]) -> float | None:
        """A bug in one job must not end the thread that everybody waits for."""
        try:
            return job()
        except Exception:
            self.errors += 1
            logger.exception("%s: unexpected error", self._thread.name)
            return _AFTER_ERROR_S
