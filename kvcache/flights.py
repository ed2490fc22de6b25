"""Copies under way between the pools and host memory, and what is to be done when they have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from kvferry.kvcache.copier import Copier, RowCopy

COPY_TIMEOUT_S = 60.0
"""Longer than any copy takes; a copier that hangs must not hang the engine for ever."""


class Flight:
    """One copy under way. landed: it has ended, and what was to be done then has been done. releases: that gives pages
    back."""

    __slots__ = ("copy", "landed", "nbytes", "releases", "then")

    def __init__(self, copies: Sequence[RowCopy], then: Callable[[], None], releases: bool) -> None:
        self.copy: Future[None] | None = None
        self.landed = False
        self.nbytes = sum(each.nbytes for each in copies)
        self.releases = releases
        self.then = then


class Flights:
    """Owned by the engine thread. A copy counts as under way until `settle` or `finish` takes note of its end: when it
    really ended changes no decision.

    copier None: every copy is made at once, by whoever starts it.
    """

    def __init__(self, copier: Copier | None) -> None:
        self._copier = copier
        self._flying: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def background(self) -> bool:
        return self._copier is not None

    @property
    def releasing(self) -> bool:
        """Whether pages come back when what is under way has ended."""
        return any(flight.releases for flight in self._flying)

    def start(self, copies: Sequence[RowCopy], then: Callable[[], None], *, releases: bool) -> Flight:
        """then: done on the engine thread when the copies have ended."""
        flight = Flight(copies, then, releases)
        if self._copier is None or not flight.nbytes:
            for each in copies:
                each.make()
            _land(flight)
        else:
            flight.copy = self._copier.submit(copies)
            self._flying.append(flight)
        return flight

    def settle(self, wait_s: float = 0.0) -> None:
        """Takes note of what has ended, in the order in which it was started; waits up to `wait_s` for the first."""
        pending = [flight.copy for flight in self._flying if flight.copy is not None]
        if pending and wait_s:
            wait(pending, wait_s, FIRST_COMPLETED)
        for flight in [flight for flight in self._flying if flight.copy is not None and flight.copy.done()]:
            self.finish(flight)

    def finish(self, flight: Flight) -> None:
        """Waits for one, ahead of its turn. Raises TimeoutError when the copier hangs."""
        if flight.landed:
            return
        assert flight.copy is not None
        flight.copy.result(COPY_TIMEOUT_S)
        self._flying.remove(flight)
        _land(flight)

    def after(self, flight: Flight, action: Callable[[], None]) -> None:
        """Does `action` when `flight` has landed, which may be now."""
        if flight.landed:
            action()
            return
        before = flight.then

        def both() -> None:
            before()
            action()

        flight.then = both

    def close(self) -> None:
        """Waits for what is under way."""
        for flight in list(self._flying):
            self.finish(flight)
        if self._copier is not None:
            self._copier.close()


def _land(flight: Flight) -> None:
    flight.landed = True
    flight.then()
