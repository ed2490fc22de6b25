"""A copier that copies when it is told to, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from kvferry.kvcache import Copier, RowCopy


class ManualCopy(Future[None]):
    """Whoever waits for it makes it."""

    def __init__(self, copies: Sequence[RowCopy], waiting: list[ManualCopy]) -> None:
        super().__init__()
        self.copies = tuple(copies)
        self._waiting = waiting
        waiting.append(self)

    def make(self) -> None:
        self._waiting.remove(self)
        for copy in self.copies:
            copy.make()
        self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.make()


class ManualCopier(Copier):
    def __init__(self) -> None:
        self.waiting: list[ManualCopy] = []
        self.closed = False

    def submit(self, copies: Sequence[RowCopy]) -> Future[None]:
        assert not self.closed
        return ManualCopy(copies, self.waiting)

    def close(self) -> None:
        self.closed = True
