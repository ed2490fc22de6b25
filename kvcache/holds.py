"""Holds: blocks kept beyond their cache's life, pinned for readers or quarantined because of late writers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

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


class SlotHold(BlockHold):
    """Registers itself in `live` until it is released, so that integrity checks can count what it keeps."""

    def __init__(
        self, kind: HoldKind, tables: tuple[BlockTable, ...], held: tuple[HeldSlots, ...], live: set[SlotHold]
    ) -> None:
        self.held = held
        self._kind = kind
        self._tables = tables
        self._live = live
        for part in held:
            if kind is HoldKind.PINNED:
                part.store.pin(part.slots)
            else:
                part.store.quarantine(part.slots)
        live.add(self)

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return self._tables

    def release(self) -> None:
        if self not in self._live:
            raise CacheStateError(f"a {self._kind.value} hold was released twice")
        self._live.remove(self)
        for part in self.held:
            deepest_first = part.slots[::-1]
            if self._kind is HoldKind.PINNED:
                part.store.unpin(deepest_first)
            else:
                part.store.end_quarantine(deepest_first)
