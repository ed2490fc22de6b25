"""Calls to code that may hang, made by a thread that nobody has to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Caller:
    """Makes calls one at a time, in order, on a thread of its own. A call that hangs keeps that thread and nothing
    else: it does not outlive the process."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._overdue: Future[object] | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def stuck(self) -> bool:
        """Whether a call that was given up still runs."""
        return self._overdue is not None and not self._overdue.done()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls `function` after those submitted before, unless the future has been cancelled by then."""
        answer: Future[T] = Future()
        self._calls.put(lambda: _answer(answer, function))
        return answer

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function` returns or raises; TimeoutError when it takes longer, and nothing may be called until it has
        ended after all."""
        assert not self.stuck, "the last call has not ended"
        answer = self.submit(function)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if not answer.done():
                self._overdue = answer  # type: ignore[assignment]
            raise

    def close(self) -> None:
        """The thread ends with the call it is making."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _answer(answer: Future[T], function: Callable[[], T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function())
    except Exception as error:
        answer.set_exception(error)
