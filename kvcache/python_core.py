"""V2's bookkeeping core in Python: readable, and the oracle the C++ core is compared with. No tensor in here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvferry.kvcache.core_v2 import Evictions, Links
from kvferry.kvcache.groups import GroupRule
from kvferry.kvcache.holds import SlotHold
from kvferry.kvcache.prefix_tree import Node, PrefixTree
from kvferry.kvcache.python_cache import PythonCache
from kvferry.kvcache.slabs import SlabIndex
from kvferry.kvcache.slots import LayerGroup, SlotStore


@dataclass(slots=True, init=False)
class PythonLedger:
    """A `CoreLedger`. reuse False: nothing is published, so a window's blocks leave as soon as they are stale."""

    groups: tuple[LayerGroup, ...]
    tokens_per_block: int
    reuse: bool
    tree: PrefixTree
    caches: set[PythonCache]
    holds: set[SlotHold]

    def __init__(
        self, rules: Sequence[GroupRule], num_slots: Sequence[int], reuse: bool, journal: bool, per_slab: Sequence[int]
    ) -> None:
        self.groups = tuple(
            LayerGroup(index, rule, SlotStore(slots, slab_slots))
            for index, (rule, slots, slab_slots) in enumerate(zip(rules, num_slots, per_slab, strict=True))
        )
        self.tokens_per_block = rules[0].tokens_per_block
        self.reuse = reuse
        self.tree = PrefixTree(self.groups, self.tokens_per_block, journal)
        self.caches = set()
        self.holds = set()

    def open(self, scope: bytes, tokens: array[int], priority: int, loaded: int) -> PythonCache:
        path, late = self.tree.find_to_load(scope, tokens, loaded) if loaded else (self.tree.find(scope, tokens), False)
        return PythonCache(self, self.tree.root(scope), path, priority, loaded if late else None)

    def match(self, scope: bytes, tokens: array[int]) -> int:
        return len(self.tree.find(scope, tokens))

    def available(self, group: int) -> int:
        return self.groups[group].store.available

    def shortage(self, needs: Sequence[int]) -> tuple[int, int, int] | None:
        for group, need in zip(self.groups, needs, strict=True):
            if need > group.store.available:
                return group.index, need, group.store.available
        return None

    def allocate(self, needs: Sequence[int], after: Sequence[int | None]) -> list[list[int]]:
        """needs[g] slots of each group, behind slot after[g] where that is free; evicts what it must.

        Evicting for one group never costs another one availability: what it takes along there was not in use either.
        """
        taken = []
        for group, need, slot in zip(self.groups, needs, after, strict=True):
            while len(group.store.free) < need:
                self.tree.evict(group)
            taken.append(group.store.take(need, slot))
        return taken

    def idle(self, group: int) -> list[int]:
        return self.groups[group].store.idle()

    def coldest(self, group: int, most: int) -> list[tuple[bytes, int]]:
        store = self.groups[group].store
        coldest = []
        for slot in islice(store.cached, most):
            node = store.publication(slot)
            assert isinstance(node, Node)
            coldest.append((node.digest, slot))
        return coldest

    def idle_slabs(self, group: int) -> int:
        return len(self._slabs(group))

    def first_idle_slabs(self, group: int, most: int) -> list[tuple[bool, int]]:
        return self._slabs(group).first(most)

    def _slabs(self, group: int) -> SlabIndex:
        slabs = self.groups[group].store.slabs
        assert slabs is not None, "this group shares its memory with none"
        return slabs

    def withhold(self, group: int, slots: Sequence[int]) -> None:
        layer_group = self.groups[group]
        for slot in slots:
            if layer_group.store.publication(slot) is not None:
                self.tree.evict_slot(layer_group, slot)
            layer_group.store.withhold(slot)

    def give_back(self, group: int, slots: Sequence[int]) -> None:
        for slot in slots:
            self.groups[group].store.give_back(slot)

    def counts(self, group: int | None = None) -> tuple[int, int, int, int, int]:
        stores = [each.store for each in (self.groups if group is None else [self.groups[group]])]
        return (
            sum(store.num_slots - store.withheld for store in stores),
            sum(store.available for store in stores),
            sum(len(store.cached) for store in stores),
            sum(store.pinned for store in stores),
            sum(store.quarantined for store in stores),
        )

    @property
    def evicted(self) -> int:
        return self.tree.evicted

    def clear(self) -> None:
        self.tree.clear()

    def drain(self) -> tuple[Links, Evictions]:
        return self.tree.drain()

    def check_integrity(self) -> None:
        for group in self.groups:
            holders: dict[int, int] = {}
            for cache in self.caches:
                _count(holders, cache.table(group.index))
            for hold in self.holds:
                _count(holders, hold.slots[group.index])
            group.store.check_integrity(holders)
        self.tree.check_integrity()


def _count(counted: dict[int, int], slots: Sequence[int]) -> None:
    for slot in slots:
        counted[slot] = counted.get(slot, 0) + 1
