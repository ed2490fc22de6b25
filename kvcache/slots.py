"""Who holds which slot of one pool. No memory here, only the books."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvferry.kvcache.eviction import EvictionQueue
from kvferry.kvcache.free_slots import FreeSlots
from kvferry.kvcache.groups import GroupRule
from kvferry.kvcache.slabs import SlabIndex


class Publication(Protocol):
    """What a prefix index knows about a published block; `priority` orders its eviction."""

    priority: int


class SlotStore:
    """Every slot is exactly one of: *free*, *held* (by caches and holds, counted), *cached* (published, unheld).

    A held slot that was never published has one owner, who may write it; a published one is only read.
    Dropping the last holder makes a slot cached if it is published, else free.
    """

    def __init__(self, num_slots: int, per_slab: int = 0) -> None:
        """per_slab: slots of a slab, where the pool shares its memory with others; else 0."""
        self.num_slots = num_slots
        self.slabs = SlabIndex(num_slots, per_slab) if per_slab else None
        self.free = FreeSlots(num_slots)
        self.cached = EvictionQueue()
        self._holders = [0] * num_slots
        self._published: dict[int, Publication] = {}
        self._pins: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._withheld: set[int] = set()

    @property
    def available(self) -> int:
        """How many slots could be taken now, evicting what is cached."""
        return len(self.free) + len(self.cached)

    @property
    def pinned(self) -> int:
        return len(self._pins)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def withheld(self) -> int:
        return len(self._withheld)

    @property
    def num_published(self) -> int:
        return len(self._published)

    def holders(self, slot: int) -> int:
        return self._holders[slot]

    def publication(self, slot: int) -> Publication | None:
        return self._published.get(slot)

    def cache_holders(self, slot: int) -> int:
        """How many hold it, pins not counted."""
        return self._holders[slot] - self._pins.get(slot, 0)

    def used_by_cache(self, slot: int) -> bool:
        """Whether anybody but pins holds it."""
        return self.cache_holders(slot) > 0

    def take(self, count: int, after: int | None) -> list[int]:
        """Takes free slots (evict first where there are too few); the caller is their one holder."""
        slots = self.free.take(count, after)
        for slot in slots:
            self._holders[slot] = 1
        if self.slabs is not None:
            for slot in slots:
                self.slabs.take(slot)
        return slots

    def hold(self, slot: int) -> None:
        """One more holder of a held or cached slot."""
        if self._holders[slot] == 0:
            self.cached.remove(slot)
            if self.slabs is not None:
                self.slabs.hold(slot)
        self._holders[slot] += 1

    def drop(self, slot: int) -> None:
        """One holder less."""
        assert self._holders[slot] > 0, f"slot {slot} is given back twice"
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._idle(slot, self._published.get(slot))

    def _idle(self, slot: int, publication: Publication | None) -> None:
        """Nobody holds it any more."""
        if publication is None:
            self.free.put(slot)
            if self.slabs is not None:
                self.slabs.free(slot)
        else:
            self.cached.push(slot, publication.priority)
            if self.slabs is not None:
                self.slabs.cache(slot, publication.priority)

    def publish(self, slot: int, publication: Publication) -> None:
        """A held slot becomes findable: from now on it is read only."""
        assert self._holders[slot] > 0, f"slot {slot} is published by nobody"
        assert slot not in self._published, f"slot {slot} is published twice"
        self._published[slot] = publication

    def unpublish(self, slot: int) -> None:
        """Forgets the content; an unheld slot becomes free."""
        del self._published[slot]
        if self._holders[slot] == 0:
            self.cached.remove(slot)
            self.free.put(slot)
            if self.slabs is not None:
                self.slabs.evict(slot)

    def idle(self) -> list[int]:
        """Slots nobody holds: the free ones, ascending, then the cached ones in the order of their eviction."""
        return [*sorted(self.free), *self.cached]

    def withhold(self, slot: int) -> None:
        """Keeps a free slot from everybody until it is given back."""
        self.free.remove(slot)
        self._withheld.add(slot)
        if self.slabs is not None:
            self.slabs.take(slot)

    def give_back(self, slot: int) -> None:
        self._withheld.remove(slot)
        self._idle(slot, None)

    def pin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.hold(slot)
            self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._pins[slot] == 1:
                del self._pins[slot]
            else:
                self._pins[slot] -= 1
            self.drop(slot)

    def quarantine(self, slots: Iterable[int]) -> None:
        """The caller's hold on unpublished slots becomes a quarantine's."""
        for slot in slots:
            assert slot not in self._published, f"slot {slot} is published, nobody may be writing it"
            self._quarantined.add(slot)

    def end_quarantine(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._quarantined.remove(slot)
            self.drop(slot)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """`holders`: how many caches and holds list each slot, counted by the manager."""
        self.free.check_integrity()
        free, cached = list(self.free), list(self.cached)
        held = [slot for slot in range(self.num_slots) if self._holders[slot]]
        everything = sorted([*free, *cached, *held, *self._withheld])
        assert everything == list(range(self.num_slots)), "a slot is lost or stands twice"
        assert not self._withheld & self._published.keys(), "a withheld slot is published"
        assert {slot: self._holders[slot] for slot in held} == holders, "holders do not add up"
        assert set(cached) <= self._published.keys()
        assert not set(free) & self._published.keys(), "a free slot is still published"
        assert all(count <= self._holders[slot] for slot, count in self._pins.items())
        assert all(self._holders[slot] for slot in self._quarantined)
        if self.slabs is not None:
            self.slabs.check_integrity({*held, *self._withheld}, set(cached))


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroup:
    """One layer group's rule and the books of its pool."""

    index: int
    rule: GroupRule
    store: SlotStore
