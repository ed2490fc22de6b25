"""Holds: blocks kept beyond their cache's life, pinned for readers or quarantined because of late writers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvferry.core import BlockTable
from kvferry.kvcache.base import BlockHold, CacheStateError
from kvferry.kvcache.slots import SlotStore


class HoldKind(Enum):
    PINNED = "pinned"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, eq=False)
class HeldSlots:
    """Slots of one store that a hold keeps."""

    store: SlotStore
    slots: Sequence[int]


class SlotHold:
    """The books' side of a hold. Registers itself in `live` until it is released, so that integrity checks can count
    what it keeps. first_blocks: block index of the first slot of each part."""

    def __init__(
        self, kind: HoldKind, held: tuple[HeldSlots, ...], first_blocks: Sequence[int], live: set[SlotHold]
    ) -> None:
        self.held = held
        self.first_blocks = tuple(first_blocks)
        self._kind = kind
        self._live = live
        for part in held:
            if kind is HoldKind.PINNED:
                part.store.pin(part.slots)
            else:
                part.store.quarantine(part.slots)
        live.add(self)

    @property
    def slots(self) -> Sequence[Sequence[int]]:
        return [part.slots for part in self.held]

    def release(self) -> None:
        assert self in self._live, f"a {self._kind.value} hold was released twice"
        self._live.remove(self)
        for part in self.held:
            deepest_first = part.slots[::-1]
            if self._kind is HoldKind.PINNED:
                part.store.unpin(deepest_first)
            else:
                part.store.end_quarantine(deepest_first)


class HoldBooks(Protocol):
    def release(self) -> None: ...


class TableHold(BlockHold):
    """What the owner of a hold sees."""

    def __init__(self, tables: tuple[BlockTable, ...], books: HoldBooks) -> None:
        self._tables = tables
        self._books: HoldBooks | None = books

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return self._tables

    def release(self) -> None:
        if self._books is None:
            raise CacheStateError("a hold on KV blocks was released twice")
        books, self._books = self._books, None
        books.release()
