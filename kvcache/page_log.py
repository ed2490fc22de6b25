"""What bookkeeping did to the pages of one rank, for the other ranks of the worker to do to theirs.

The manager of rank 0 decides for all ranks: a block id means the same slot in every rank's pools. Its `Pages` note here
what they change, and the ranks apply it in the same order, before the next forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PageChange(Enum):
    """CLAIM: slots got a new owner. COPY: (source, slot). ZERO: one slot."""

    CLAIM = 1
    COPY = 2
    ZERO = 3


@dataclass(frozen=True, slots=True)
class LoggedChange:
    change: PageChange
    group: int
    slots: tuple[int, ...]


class ChangeablePages(Protocol):
    """`kvferry.kvcache.pool.Pages`, as far as its changes are repeated elsewhere."""

    def claim(self, group: int, slots: Sequence[int]) -> None: ...
    def copy(self, group: int, source: int, slot: int) -> None: ...
    def zero(self, group: int, slot: int) -> None: ...


class PageLog:
    """Owned by the thread that owns the manager."""

    def __init__(self) -> None:
        self._changes: list[LoggedChange] = []

    def __len__(self) -> int:
        return len(self._changes)

    def note(self, change: PageChange, group: int, slots: Sequence[int]) -> None:
        self._changes.append(LoggedChange(change, group, tuple(slots)))

    def drain(self) -> list[LoggedChange]:
        """Everything noted since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes


def repeat_changes(changes: Sequence[LoggedChange], pages: ChangeablePages) -> None:
    for logged in changes:
        match logged.change:
            case PageChange.CLAIM:
                pages.claim(logged.group, logged.slots)
            case PageChange.COPY:
                pages.copy(logged.group, *logged.slots)
            case PageChange.ZERO:
                pages.zero(logged.group, *logged.slots)
