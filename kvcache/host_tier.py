"""The tier below the pools: host memory for suspended caches, and for prefixes that eviction pushed out of the pools.

A block here is named by its digest, so it belongs to every request with that prefix. What is parked belongs to one
suspended cache and is never given up; what is kept is, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch

from kvferry.core import ConfigError, KVLayout, Tier
from kvferry.kvcache.base import TierCounts
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.free_slots import FreeSlots
from kvferry.kvcache.groups import GroupRule


class Shelf:
    """One layer group's slots. `rows` of a pool or a shelf: uint8 [slots, slot_nbytes]."""

    def __init__(self, layout: KVLayout, num_slots: int, events: KVEventLog | None = None) -> None:
        """events: told what is kept here and what is given up."""
        self.num_slots = num_slots
        self.rows = torch.zeros((num_slots, layout.slot_nbytes), dtype=torch.uint8)
        self._free = FreeSlots(num_slots)
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self._lent: set[bytes] = set()
        self._events = events

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def kept(self) -> int:
        return len(self._kept) + len(self._lent)

    @property
    def room(self) -> int:
        """Slots that parking could have."""
        return len(self._free) + len(self._kept)

    def keep(self, blocks: Mapping[bytes, int], rows: torch.Tensor) -> None:
        """Copies blocks (digest -> slot in `rows`) as far as slots are to be had; the last ones are the newest."""
        copies: dict[int, int] = {}
        for digest, source in blocks.items():
            if digest in self._kept:
                self._kept.move_to_end(digest)
            elif digest not in self._lent and self.room:
                slot = self._take_one()
                self._kept[digest] = slot
                if self._events is not None:
                    self._events.copied(digest, Tier.HOST)
                copies[slot] = source  # a slot that this very call filled and gave up again: the newest wins
        _copy(self.rows, list(copies), rows, list(copies.values()))

    def park(self, sources: Sequence[int], rows: torch.Tensor) -> list[int]:
        """Copies slots of `rows` to slots of their own; there must be `room`."""
        slots = [self._take_one() for _ in sources]
        _copy(self.rows, slots, rows, sources)
        return slots

    def unpark(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._free.put(slot)

    def lend(self, digests: Sequence[bytes]) -> list[int]:
        """The slots of kept blocks, which nothing overwrites until `end_loan`."""
        self._lent.update(digests)
        return [self._kept.pop(digest) for digest in digests]

    def end_loan(self, digests: Sequence[bytes], slots: Sequence[int]) -> None:
        """They are now the most recently used, the last one least so: who reuses a prefix needs its start most."""
        for digest, slot in zip(reversed(digests), reversed(slots), strict=True):
            self._lent.remove(digest)
            self._kept[digest] = slot

    def clear(self) -> None:
        """Forgets what is kept."""
        while self._kept:
            self._give_up_oldest()

    def _take_one(self) -> int:
        if not len(self._free):
            self._give_up_oldest()
        return self._free.take(1)[0]

    def _give_up_oldest(self) -> None:
        digest, slot = self._kept.popitem(last=False)
        self._free.put(slot)
        if self._events is not None:
            self._events.removed(digest, Tier.HOST)

    def check_integrity(self, parked: Sequence[int]) -> None:
        self._free.check_integrity()
        assert not self._lent, "a loan was never ended"
        slots = [*self._free, *self._kept.values(), *parked]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of the host tier is lost or stands twice"


def _copy(to_rows: torch.Tensor, to: Sequence[int], from_rows: torch.Tensor, sources: Sequence[int]) -> None:
    if to:
        moved = from_rows[torch.tensor(sources, device=from_rows.device)]
        to_rows[torch.tensor(to, device=to_rows.device)] = moved.to(to_rows.device)


class Parked:
    """The bytes of one suspended cache: per group its slots, the first of them block `first_blocks[group]`."""

    def __init__(self, tier: HostTier, slots: Sequence[list[int]], first_blocks: Sequence[int]) -> None:
        self.slots = slots
        self.first_blocks = first_blocks
        self._tier = tier
        tier.parked.add(self)

    def release(self) -> None:
        self._tier.parked.remove(self)
        for shelf, slots in zip(self._tier.shelves, self.slots, strict=True):
            shelf.unpark(slots)


class HostTier:
    """A shelf per layer group. Not thread-safe: the manager that owns it runs on the engine thread."""

    def __init__(self, layouts: Sequence[KVLayout], nbytes: int, events: KVEventLog | None = None) -> None:
        """events: told which blocks are here, going by the first group that keeps every block of a sequence.

        Raises ConfigError when not even one block of each group fits."""
        row_nbytes = sum(layout.slot_nbytes for layout in layouts)
        if nbytes < row_nbytes:
            raise ConfigError(
                f"kv_cache.host_bytes is {nbytes}, but one block takes {row_nbytes} bytes: set it to 0 for no host "
                f"tier, or to at least {row_nbytes}",
                field="kv_cache.host_bytes",
            )
        self._rules = [GroupRule.of(layout) for layout in layouts]
        lead = next((group for group, rule in enumerate(self._rules) if rule.keeps_all), 0)
        self.shelves = [
            Shelf(layout, nbytes // row_nbytes, events if group == lead else None)
            for group, layout in enumerate(layouts)
        ]
        self.parked: set[Parked] = set()

    def park(
        self, tables: Sequence[Sequence[int]], first_blocks: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> Parked | None:
        """Copies the pool slots `tables`; None, with nothing changed, when there is too little room."""
        if any(len(table) > shelf.room for table, shelf in zip(tables, self.shelves, strict=True)):
            return None
        slots = [shelf.park(table, pool) for shelf, table, pool in zip(self.shelves, tables, rows, strict=True)]
        return Parked(self, slots, first_blocks)

    def servable(self, start: int, digests: Sequence[bytes]) -> int:
        """How many of the blocks [start, start + len(digests)) can follow a prefix of `start` blocks that a cache
        has already: a window must have the last few without a gap."""
        length = 0
        gap_ends = [0] * len(self._rules)
        for stop, digest in enumerate(digests, start=start + 1):
            served = True
            for group, (rule, shelf) in enumerate(zip(self._rules, self.shelves, strict=True)):
                if digest not in shelf:
                    if rule.keeps_all:
                        return length
                    gap_ends[group] = stop
                served = served and gap_ends[group] <= rule.first_live_block(stop * rule.tokens_per_block)
            if served:
                length = stop - start
        return length

    def clear(self) -> None:
        for shelf in self.shelves:
            shelf.clear()

    def counts(self) -> TierCounts:
        shelves = self.shelves
        total, free = sum(shelf.num_slots for shelf in shelves), sum(shelf.free for shelf in shelves)
        kept = sum(shelf.kept for shelf in shelves)
        return TierCounts("host", total, free, kept, total - free - kept)

    def check_integrity(self) -> None:
        for group, shelf in enumerate(self.shelves):
            shelf.check_integrity([slot for parked in self.parked for slot in parked.slots[group]])
