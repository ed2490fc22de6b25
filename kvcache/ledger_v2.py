"""V2's bookkeeping core: layer groups, the prefix tree and everybody who holds a slot. No tensor in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvferry.core import BlockCounts
from kvferry.kvcache.base import OutOfBlocksError
from kvferry.kvcache.groups import LayerGroup
from kvferry.kvcache.holds import SlotHold
from kvferry.kvcache.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from kvferry.kvcache.cache_v2 import CacheV2


class PageBook(Protocol):
    """What the core asks of memory."""

    def claim(self, group: int, slots: Sequence[int]) -> None: ...

    def generations(self, group: int, slots: Sequence[int]) -> tuple[int, ...]: ...


class LedgerV2:
    """Shared by a manager and its caches. `reuse` False: nothing is published, every cache starts empty."""

    def __init__(self, groups: Sequence[LayerGroup], tokens_per_block: int, pages: PageBook, reuse: bool) -> None:
        self.groups = tuple(groups)
        self.tokens_per_block = tokens_per_block
        self.pages = pages
        self.reuse = reuse
        self.tree = PrefixTree(groups, tokens_per_block)
        self.caches: set[CacheV2] = set()
        self.holds: set[SlotHold] = set()

    def allocate(self, needs: Sequence[int], after: Sequence[int | None]) -> list[list[int]]:
        """needs[g] slots of each group, behind slot after[g] where that is free; evicts what it must.

        All or nothing: OutOfBlocksError comes before the first change. Evicting for one group never costs
        another one availability: what it takes along there was not in use either.
        """
        for group, need in zip(self.groups, needs, strict=True):
            self._check_available(group, need)
        taken = []
        for group, need, slot in zip(self.groups, needs, after, strict=True):
            while len(group.store.free) < need:
                self.tree.evict(group)
            slots = group.store.take(need, slot)
            if slots:
                self.pages.claim(group.index, slots)
            taken.append(slots)
        return taken

    def _check_available(self, group: LayerGroup, need: int) -> None:
        available = group.store.available
        if need > available:
            raise OutOfBlocksError(
                f"{need} more KV blocks are needed in layer group {group.index} ({group.layout.kind.value}), "
                f"{available} of {group.store.num_slots} are free: wait, preempt, or raise kv_cache.bytes",
                field="kv_cache.bytes",
            )

    def counts(self) -> BlockCounts:
        stores = [group.store for group in self.groups]
        return BlockCounts(
            total=sum(store.num_slots for store in stores),
            free=sum(store.available for store in stores),
            cached=sum(len(store.cached) for store in stores),
            pinned=sum(store.pinned for store in stores),
            quarantined=sum(store.quarantined for store in stores),
        )

    def check_integrity(self) -> None:
        holders: list[dict[int, int]] = [{} for _ in self.groups]
        for cache in self.caches:
            cache.check_integrity()
            for counted, group in zip(holders, self.groups, strict=True):
                _count(counted, cache.block_table(group.index))
        for hold in self.holds:
            for part in hold.held:
                group = next(group for group in self.groups if group.store is part.store)
                _count(holders[group.index], part.slots)
        for counted, group in zip(holders, self.groups, strict=True):
            group.store.check_integrity(counted)
        self.tree.check_integrity()


def _count(counted: dict[int, int], slots: Sequence[int]) -> None:
    for slot in slots:
        counted[slot] = counted.get(slot, 0) + 1
