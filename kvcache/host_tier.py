"""The tier below the pools: host memory for suspended caches, and for prefixes that eviction pushed out of the pools.

A block here is named by its digest, so it belongs to every request with that prefix. What is parked belongs to one
suspended cache and is never given up; what is kept is, least recently used first. A slot that a copy under way writes
or reads is neither: it gets no other writer before that copy has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from kvferry.core import KVLayout, Tier, TierCounts
from kvferry.kvcache.copier import RowCopy
from kvferry.kvcache.disk_tier import DiskShelf, DiskTier
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.free_slots import FreeSlots
from kvferry.kvcache.groups import GroupRule, lead_group
from kvferry.kvcache.parked import Parked, StoredRows
from kvferry.kvcache.pool import allocate_host_zeros, blocks_for_budget, slot_counts


class Shelf:
    """One layer group's slots. `rows` of a pool or a shelf: uint8 [slots, slot_nbytes]."""

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        events: KVEventLog | None = None,
        below: DiskShelf | None = None,
        device: str = "cpu",
    ) -> None:
        """events: told what is kept here and what is given up. below: where that goes. device: of the pools."""
        self.num_slots = num_slots
        rows = allocate_host_zeros(num_slots * layout.slot_nbytes, device, "kv_cache.host_bytes")
        self.rows = rows.view(num_slots, layout.slot_nbytes)
        self._free = FreeSlots(num_slots)
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self._lent: dict[bytes, int] = {}
        self._coming: dict[bytes, int] = {}
        self._void: set[int] = set()  # slots of copies under way that nobody wants any more
        self._events = events
        self._below = below

    def in_memory(self, digest: bytes) -> bool:
        return digest in self._kept

    def anywhere(self, digest: bytes) -> bool:
        """In memory, lent or not, or on disk, where it may turn out to be torn."""
        return self._here(digest) or (self._below is not None and digest in self._below)

    def _here(self, digest: bytes) -> bool:
        return digest in self._kept or digest in self._lent

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def kept(self) -> int:
        return len(self._kept) + len(self._lent) + len(self._coming) + len(self._void)

    @property
    def room(self) -> int:
        """Slots that parking could have."""
        return len(self._free) + len(self._kept)

    def keep(self, blocks: Mapping[bytes, int], rows: torch.Tensor) -> int:
        """Copies blocks (digest -> slot in `rows`) as far as slots are to be had and they are not here already; how
        many it copied. The last ones are the newest. A copy under way of one of them comes too late and is void."""
        copied = 0
        for digest, source in blocks.items():
            if digest in self._kept:
                self._kept.move_to_end(digest)
            elif digest not in self._lent:
                self._void_coming(digest)
                if self.room:
                    self.rows[self._keep_in_new_slot(digest)] = rows[source].to(self.rows.device)
                    copied += 1
        return copied

    def expect(self, digest: bytes) -> int | None:
        """A slot for a block that a copy is to bring, which `arrived` ends; None where there is no room, or the block
        is here or coming already."""
        if self._here(digest) or digest in self._coming or not self.room:
            return None
        slot = self._coming[digest] = self._take_one()
        return slot

    def arrived(self, digest: bytes, slot: int) -> None:
        """The copy to a slot that was got from `expect` has ended. The block is now the most recently used."""
        if slot in self._void:
            self._void.remove(slot)
            self._free.put(slot)
            return
        del self._coming[digest]
        if digest in self._kept:  # it came up from below meanwhile
            self._free.put(slot)
        else:
            self._kept[digest] = slot
            self._told(digest)

    def _void_coming(self, digest: bytes) -> None:
        slot = self._coming.pop(digest, None)
        if slot is not None:
            self._void.add(slot)

    def prefetch(self, digests: Sequence[bytes]) -> bool:
        """Brings up from below what has been read by now, and starts reading more; whether all of `digests` that are
        anywhere are here. There must be `room` for them."""
        below = self._below
        if below is None:
            return True
        self._use(digests)
        ready = True
        for digest in digests:
            if not self._here(digest) and digest in below:
                if below.fetch(digest):
                    self._bring_up(below, digest)
                else:
                    ready = False
        return ready

    def load(self, digests: Sequence[bytes]) -> bool:
        """Brings blocks up from below; there must be `room` for all of `digests`. False when one of them was torn."""
        self._use(digests)
        whole = True
        for digest in digests:
            if not self._here(digest) and self._below is not None and digest in self._below:
                whole = self._bring_up(self._below, digest) and whole
        return whole

    def _use(self, digests: Sequence[bytes]) -> None:
        """Making room for some of `digests` must not give up others."""
        assert len(digests) <= self.room
        for digest in reversed(digests):
            if digest in self._kept:
                self._kept.move_to_end(digest)

    def _bring_up(self, below: DiskShelf, digest: bytes) -> bool:
        payload = below.read(digest)
        if payload is None:
            return False
        self.rows[self._keep_in_new_slot(digest)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return True

    def _keep_in_new_slot(self, digest: bytes) -> int:
        slot = self._kept[digest] = self._take_one()
        self._told(digest)
        return slot

    def _told(self, digest: bytes) -> None:
        if self._events is not None:
            self._events.copied(digest, Tier.HOST)

    def park(self, count: int) -> list[int]:
        """Slots for what is parked; there must be `room`."""
        return [self._take_one() for _ in range(count)]

    def unpark(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._free.put(slot)

    def lend(self, digests: Sequence[bytes]) -> list[int]:
        """The slots of kept blocks, which nothing overwrites until `end_loan`."""
        slots = [self._kept.pop(digest) for digest in digests]
        self._lent.update(zip(digests, slots, strict=True))
        return slots

    def end_loan(self, digests: Sequence[bytes], slots: Sequence[int]) -> None:
        """They are now the most recently used, the last one least so: who reuses a prefix needs its start most."""
        for digest, slot in zip(reversed(digests), reversed(slots), strict=True):
            if slot in self._void:
                self._void.remove(slot)
                self._free.put(slot)
            else:
                self._kept[digest] = self._lent.pop(digest)

    def clear(self) -> None:
        """Forgets what is kept, lent or coming."""
        for digest, slot in self._kept.items():
            self._forgotten(digest)
            self._free.put(slot)
        self._kept.clear()
        for digest in self._lent:
            self._forgotten(digest)
        for blocks in (self._lent, self._coming):
            self._void.update(blocks.values())
            blocks.clear()
        if self._below is not None:
            self._below.clear()

    def _take_one(self) -> int:
        if not len(self._free):
            self._give_up_oldest()
        return self._free.take(1)[0]

    def _give_up_oldest(self) -> None:
        digest, slot = self._kept.popitem(last=False)
        if self._below is not None:
            self._below.keep(digest, self.rows[slot])
        self._forgotten(digest)
        self._free.put(slot)

    def _forgotten(self, digest: bytes) -> None:
        if self._events is not None:
            self._events.removed(digest, Tier.HOST)

    def check_integrity(self, parked: Sequence[int]) -> None:
        self._free.check_integrity()
        under_way = [*self._lent.values(), *self._coming.values(), *self._void]
        slots = [*self._free, *self._kept.values(), *under_way, *parked]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of the host tier is lost or stands twice"
        if self._below is not None:
            self._below.check_integrity()


class HostParked(Parked):
    def __init__(
        self, tier: HostTier, slots: Sequence[list[int]], first_blocks: Sequence[int], copies: Sequence[RowCopy]
    ) -> None:
        """slots: per group those of its shelf, which `copies` will fill."""
        super().__init__(first_blocks, copies)
        self.slots = slots
        self._tier = tier
        tier.parked.add(self)

    def prepare(self) -> bool:
        return True

    def stored(self, group: int, skip: int) -> StoredRows:
        return StoredRows(self._tier.shelves[group].rows, self.slots[group][skip:])

    def release(self) -> None:
        self._tier.parked.remove(self)
        for shelf, slots in zip(self._tier.shelves, self.slots, strict=True):
            shelf.unpark(slots)


class HostTier:
    """A shelf per layer group. Not thread-safe: the manager that owns it runs on the engine thread."""

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        rules: Sequence[GroupRule],
        nbytes: int,
        events: KVEventLog | None = None,
        disk: DiskTier | None = None,
        typical_tokens: int | None = None,
        device: str = "cpu",
    ) -> None:
        """events: told which blocks are here, going by the lead group. disk: the tier below, owned from here on.
        typical_tokens: see `CacheOptions`. device: of the pools.

        Raises ConfigError when not even one block of each group fits."""
        num_blocks = blocks_for_budget(layouts, nbytes, "kv_cache.host_bytes", typical_tokens)
        self._rules = tuple(rules)
        self._disk = disk
        lead = lead_group(self._rules)
        slots_of = slot_counts(layouts, num_blocks, typical_tokens)
        self.shelves = [
            Shelf(
                layout,
                slots,
                events if group == lead else None,
                disk.shelves[group] if disk is not None else None,
                device,
            )
            for group, (layout, slots) in enumerate(zip(layouts, slots_of, strict=True))
        ]
        self.parked: set[HostParked] = set()

    def park(
        self, tables: Sequence[Sequence[int]], first_blocks: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> Parked | None:
        """A place for the pool slots `tables`, which the caller copies there; where this tier has too little room,
        copies of them in the tier below. None, with nothing changed, when that has too little too."""
        if any(len(table) > shelf.room for table, shelf in zip(tables, self.shelves, strict=True)):
            return None if self._disk is None else self._disk.park(tables, first_blocks, rows)
        slots = [shelf.park(len(table)) for shelf, table in zip(self.shelves, tables, strict=True)]
        copies = [
            RowCopy(shelf.rows, to, pool, table)
            for shelf, to, pool, table in zip(self.shelves, slots, rows, tables, strict=True)
        ]
        return HostParked(self, slots, first_blocks, copies)

    def servable(self, start: int, digests: Sequence[bytes]) -> int:
        """How many of the blocks [start, start + len(digests)) can follow a prefix of `start` blocks that a cache
        has already, if what is on disk is whole."""
        return self._servable(start, digests, Shelf.anywhere)

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def prefetch(self, start: int, digests: Sequence[bytes]) -> bool:
        """Brings up what `stage` would have to, as it has been read; whether all of it is in memory."""
        wanted = self._wanted(start, digests, min(self.servable(start, digests), *(s.room for s in self.shelves)))
        ready = [shelf.prefetch(some) for shelf, some in zip(self.shelves, wanted, strict=True)]
        return all(ready)

    def _wanted(self, start: int, digests: Sequence[bytes], stop: int) -> list[Sequence[bytes]]:
        """Which of the first `stop` blocks each group has to have for all of them to be served."""
        return [
            digests[max(0, rule.first_live_block((start + stop) * rule.tokens_per_block) - start) : stop]
            for rule in self._rules
        ]

    def stage(self, start: int, digests: Sequence[bytes]) -> int:
        """Brings those blocks into memory; how many can now be served from there."""
        whole = self._disk is None
        while not whole:  # a torn record is forgotten, so this ends
            stop = min(self.servable(start, digests), *(shelf.room for shelf in self.shelves))
            wanted = self._wanted(start, digests, stop)
            whole = all(shelf.load(some) for shelf, some in zip(self.shelves, wanted, strict=True))
        return self._servable(start, digests, Shelf.in_memory)

    def _servable(self, start: int, digests: Sequence[bytes], present: Callable[[Shelf, bytes], bool]) -> int:
        """A window must have the last few blocks without a gap, the other groups all of them."""
        length = 0
        gap_ends = [0] * len(self._rules)
        for stop, digest in enumerate(digests, start=start + 1):
            served = True
            for group, (rule, shelf) in enumerate(zip(self._rules, self.shelves, strict=True)):
                if not present(shelf, digest):
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

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def counts(self) -> tuple[TierCounts, ...]:
        """This tier's and that of the one below."""
        shelves = self.shelves
        total, free = sum(shelf.num_slots for shelf in shelves), sum(shelf.free for shelf in shelves)
        kept = sum(shelf.kept for shelf in shelves)
        host = TierCounts("host", total, free, kept, total - free - kept)
        return (host,) if self._disk is None else (host, self._disk.counts())

    def check_integrity(self) -> None:
        for group, shelf in enumerate(self.shelves):
            shelf.check_integrity([slot for parked in self.parked for slot in parked.slots[group]])
