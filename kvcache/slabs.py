"""Which stretches of a shared pool could change hands: kept up to date with every slot, never looked for."""

from __future__ import annotations

from itertools import islice

from kvferry.kvcache.eviction import EvictionQueue


class SlabIndex:
    """The slabs of one pool, `per_slab` slots each, in which nobody holds a slot.

    Slots are free, cached or busy (held, or withheld). A slab is *idle* while none of its slots is busy. Every
    operation takes constant time.
    """

    def __init__(self, num_slots: int, per_slab: int) -> None:
        """All slots are free."""
        assert num_slots % per_slab == 0, f"{num_slots} slots are no whole number of slabs of {per_slab}"
        self._per_slab = per_slab
        num_slabs = num_slots // per_slab
        self._busy = [0] * num_slabs
        self._cached = [0] * num_slabs
        # Of a slab with cached slots: the highest priority of those that came since it had none.
        self._priority = [0] * num_slabs
        self._empty = EvictionQueue()  # idle, with nothing cached
        self._full = EvictionQueue()  # idle, with something cached
        for slab in range(num_slabs):
            self._empty.push(slab, 0)

    def __len__(self) -> int:
        """How many slabs are idle."""
        return len(self._empty) + len(self._full)

    def first(self, most: int) -> list[tuple[bool, int]]:
        """Up to `most` idle slabs as (whether something is cached there, slab): empty ones first, then in the order in
        which eviction would have come to them: lowest priority, then idle for longest."""
        chosen = [(False, slab) for slab in islice(self._empty, most)]
        return chosen + [(True, slab) for slab in islice(self._full, most - len(chosen))]

    def take(self, slot: int) -> None:
        """A free slot becomes busy."""
        slab = slot // self._per_slab
        self._leave(slab)
        self._busy[slab] += 1

    def hold(self, slot: int) -> None:
        """A cached slot becomes busy."""
        slab = slot // self._per_slab
        self._leave(slab)
        self._busy[slab] += 1
        self._cached[slab] -= 1

    def free(self, slot: int) -> None:
        """A busy slot becomes free."""
        slab = slot // self._per_slab
        self._busy[slab] -= 1
        self._enter(slab)

    def cache(self, slot: int, priority: int) -> None:
        """A busy slot becomes cached."""
        slab = slot // self._per_slab
        self._priority[slab] = max(self._priority[slab], priority) if self._cached[slab] else priority
        self._busy[slab] -= 1
        self._cached[slab] += 1
        self._enter(slab)

    def evict(self, slot: int) -> None:
        """A cached slot becomes free."""
        slab = slot // self._per_slab
        self._cached[slab] -= 1
        if not self._busy[slab] and not self._cached[slab]:
            self._full.remove(slab)
            self._empty.push(slab, 0)

    def _enter(self, slab: int) -> None:
        if self._busy[slab]:
            return
        if self._cached[slab]:
            self._full.push(slab, self._priority[slab])
        else:
            self._empty.push(slab, 0)

    def _leave(self, slab: int) -> None:
        if not self._busy[slab]:
            (self._full if self._cached[slab] else self._empty).remove(slab)

    def check_integrity(self, busy: set[int], cached: set[int]) -> None:
        """busy, cached: the slots that are."""
        for slab in range(len(self._busy)):
            slots = set(range(slab * self._per_slab, (slab + 1) * self._per_slab))
            assert self._busy[slab] == len(slots & busy), "busy slots of a slab do not add up"
            assert self._cached[slab] == len(slots & cached), "cached slots of a slab do not add up"
            assert (slab in self._empty) == (not slots & busy and not slots & cached)
            assert (slab in self._full) == (not slots & busy and bool(slots & cached))
