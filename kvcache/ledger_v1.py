"""The books of manager V1: which slot holds which block, and who holds it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.core import CacheStatistics, Tier, block_digest
from kvferry.kvcache.base import OutOfBlocksError
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.holds import SlotHold
from kvferry.kvcache.pool import Pages
from kvferry.kvcache.slots import SlotStore
from kvferry.kvcache.tiering_v1 import BelowV1

if TYPE_CHECKING:
    from kvferry.kvcache.manager_v1 import CacheV1


class ChainEntry:
    """One published block under the digest of the whole prefix that ends with it."""

    __slots__ = ("digest", "priority", "slot")

    def __init__(self, digest: bytes, slot: int, priority: int) -> None:
        self.digest = digest
        self.slot = slot
        self.priority = priority


class LedgerV1:
    """The books of V1: one store for all pools, one hash chain. Shared by the manager and its caches.

    A chain whose middle was evicted is found up to the gap only; what lies behind it ages out, or becomes
    findable again when the gap is computed and published anew.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        pages: Pages,
        below: BelowV1,
        reuse: bool,
        events: KVEventLog | None,
        statistics: CacheStatistics,
    ) -> None:
        self.events = events
        self.below = below
        self.store = SlotStore(num_blocks)
        self.tokens_per_block = tokens_per_block
        self.pages = pages
        self.reuse = reuse
        self.chain: dict[bytes, ChainEntry] = {}
        self.statistics = statistics
        self.withheld: list[int] = []  # slots a quota keeps from everybody
        self.caches: set[CacheV1] = set()
        self.holds: set[SlotHold] = set()

    def find(self, scope: bytes, tokens: array[int]) -> list[ChainEntry]:
        """The longest published prefix of `tokens` in the pools, first block first."""
        size, digest = self.tokens_per_block, scope
        path: list[ChainEntry] = []
        for start in range(0, len(tokens) - size + 1, size):
            digest = block_digest(digest, tokens[start : start + size])
            entry = self.chain.get(digest)
            if entry is None:
                break
            path.append(entry)
        return path

    def match(self, scope: bytes, tokens: array[int]) -> int:
        """Blocks of the longest prefix that the pools and what lies below can serve together."""
        path = self.find(scope, tokens)
        return len(path) + self.below.servable(self._digests_behind(scope, path, tokens))

    def restore(self, scope: bytes, path: Sequence[ChainEntry], tokens: array[int], priority: int) -> list[ChainEntry]:
        """Brings up the blocks of `tokens` that lie below and follow the published prefix `path`, as many as there are
        slots for, and publishes them; the caller, who holds `path`, holds them too."""
        digests = self._digests_behind(scope, path, tokens)[: self.store.available]
        if not digests:
            return []
        found = self.below.find(digests)
        slots = self.allocate(len(found), path[-1].slot if path else None)
        found.bring_up(slots)
        size, parent, entries = self.tokens_per_block, path[-1].digest if path else scope, []
        for start, slot in zip(range(len(path) * size, len(tokens), size), slots, strict=False):
            entry, _ = self.publish(parent, tokens[start : start + size], slot, priority)
            self.adopt(entry, slot)
            parent = entry.digest
            entries.append(entry)
        self.statistics.restored_tokens += (len(found) - len(found.loaded)) * size
        self.statistics.loaded_tokens += len(found.loaded) * size
        return entries

    def _digests_behind(self, scope: bytes, path: Sequence[ChainEntry], tokens: array[int]) -> list[bytes]:
        """Of the blocks of `tokens` behind `path`; none where nobody below could be asked about them."""
        if self.below.empty or not self.reuse:
            return []
        size, digest = self.tokens_per_block, path[-1].digest if path else scope
        digests = []
        for start in range(len(path) * size, len(tokens) - size + 1, size):
            digest = block_digest(digest, tokens[start : start + size])
            digests.append(digest)
        return digests

    def allocate(self, need: int, after: int | None) -> list[int]:
        """All or nothing: OutOfBlocksError comes before the first change."""
        if need > self.store.available:
            raise OutOfBlocksError(
                f"{need} more KV blocks are needed, {self.store.available} of {self.store.num_slots} are free: "
                "wait, preempt, or raise kv_cache.bytes",
                field="kv_cache.bytes",
            )
        while len(self.store.free) < need:
            self.statistics.evicted_blocks += len(self.pages.pools)
            self._evict(self.store.cached.oldest())
        slots = self.store.take(need, after)
        for group in range(len(self.pages.pools)):
            self.pages.claim(group, slots)
        return slots

    def copy(self, source: int, slot: int) -> None:
        """The bytes of a block that the caller holds go to a slot of its own, which it holds instead."""
        for group in range(len(self.pages.pools)):
            self.pages.copy(group, source, slot)
        self.store.drop(source)

    def withhold(self, blocks: int) -> None:
        """Keeps `blocks` blocks from everybody, more or fewer than before. All or nothing."""
        while len(self.withheld) > blocks:
            self.store.drop(self.withheld.pop())
        if blocks > len(self.withheld):
            self.withheld += self.allocate(blocks - len(self.withheld), None)

    def publish(self, parent: bytes, tokens: array[int], slot: int, priority: int) -> tuple[ChainEntry, bool]:
        """The entry of the block with `tokens` behind the prefix `parent`, made of `slot` if there is none; whether
        there was none."""
        digest = block_digest(parent, tokens)
        entry = self.chain.get(digest)
        new = entry is None
        if entry is None:
            entry = ChainEntry(digest, slot, priority)
            self.store.publish(slot, entry)
            self.chain[digest] = entry
            if self.events is not None:
                self.events.stored(digest, parent, tokens)
        entry.priority = max(entry.priority, priority)
        return entry, new

    def adopt(self, entry: ChainEntry, mine: int) -> None:
        """The caller holds the published block instead of `mine`, which another request was first to publish."""
        if entry.slot != mine:
            self.store.hold(entry.slot)
            self.store.drop(mine)  # a pin may keep it

    def clear(self) -> None:
        for entry in list(self.chain.values()):
            if not self.store.used_by_cache(entry.slot):
                self._forget(entry.slot)
        self.below.clear()

    def _evict(self, slot: int) -> None:
        entry = self.store.publication(slot)
        assert isinstance(entry, ChainEntry)
        self.below.evicted(entry.digest, slot)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        entry = self.store.publication(slot)
        assert isinstance(entry, ChainEntry)
        del self.chain[entry.digest]
        self.store.unpublish(slot)
        if self.events is not None:
            self.events.removed(entry.digest, Tier.DEVICE)

    def check_integrity(self) -> None:
        holders: dict[int, int] = {}
        for cache in self.caches:
            cache.check_integrity()
        tables = [cache.block_table(0) for cache in self.caches]
        tables += [part.slots for hold in self.holds for part in hold.held]
        for table in [*tables, self.withheld]:
            for slot in table:
                holders[slot] = holders.get(slot, 0) + 1
        self.store.check_integrity(holders)
        assert self.store.num_published == len(self.chain)
        for digest, entry in self.chain.items():
            assert entry.digest == digest
            assert self.store.publication(entry.slot) is entry
        self.below.check_integrity()
        if self.events is not None:
            assert self.events.held(Tier.DEVICE) == self.chain.keys(), "events and chain disagree"
