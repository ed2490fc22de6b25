"""Manager V1: every layer keeps every block, so one block id stands for the same slot in every pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvferry.core import BlockCounts, BlockTable, ConfigError, KVLayout, Tier, block_digest, scope_digest
from kvferry.kvcache.base import (
    BlockHold,
    CacheStateError,
    CacheStatistics,
    KVCache,
    KVCacheManager,
    KVPool,
    OutOfBlocksError,
    TierCounts,
)
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.groups import check_layouts
from kvferry.kvcache.holds import HeldSlots, HoldKind, SlotHold, TableHold
from kvferry.kvcache.lengths import CacheState, TrackedCache
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.pool import Pages, blocks_for_budget, build_pool, withheld_blocks
from kvferry.kvcache.slots import SlotStore


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
        self, num_blocks: int, tokens_per_block: int, pages: Pages, reuse: bool, events: KVEventLog | None
    ) -> None:
        self.events = events
        self.store = SlotStore(num_blocks)
        self.tokens_per_block = tokens_per_block
        self.pages = pages
        self.reuse = reuse
        self.chain: dict[bytes, ChainEntry] = {}
        self.statistics = CacheStatistics()
        self.withheld: list[int] = []  # slots a quota keeps from everybody
        self.caches: set[CacheV1] = set()
        self.holds: set[SlotHold] = set()

    def find(self, scope: str, token_ids: Sequence[int], max_tokens: int) -> list[ChainEntry]:
        """The longest published prefix of at most `max_tokens`, first block first."""
        size, digest = self.tokens_per_block, scope_digest(scope)
        stop = min(max_tokens, len(token_ids)) // size * size
        packed = array("I", token_ids[:stop])
        path: list[ChainEntry] = []
        for start in range(0, stop, size):
            digest = block_digest(digest, packed[start : start + size])
            entry = self.chain.get(digest)
            if entry is None:
                break
            path.append(entry)
        return path

    def allocate(self, need: int, after: int | None) -> list[int]:
        """All or nothing: OutOfBlocksError comes before the first change."""
        if need > self.store.available:
            raise OutOfBlocksError(
                f"{need} more KV blocks are needed, {self.store.available} of {self.store.num_slots} are free: "
                "wait, preempt, or raise kv_cache.bytes",
                field="kv_cache.bytes",
            )
        while len(self.store.free) < need:
            self._forget(self.store.cached.oldest())
        slots = self.store.take(need, after)
        for group in range(len(self.pages.pools)):
            self.pages.claim(group, slots)
        return slots

    def withhold(self, blocks: int) -> None:
        """Keeps `blocks` blocks from everybody, more or fewer than before. All or nothing."""
        while len(self.withheld) > blocks:
            self.store.drop(self.withheld.pop())
        if blocks > len(self.withheld):
            self.withheld += self.allocate(blocks - len(self.withheld), None)

    def publish(self, parent: bytes, tokens: array[int], slot: int, priority: int) -> ChainEntry:
        """The entry of the block with `tokens` behind the prefix `parent`, made of `slot` if there is none."""
        digest = block_digest(parent, tokens)
        entry = self.chain.get(digest)
        if entry is None:
            entry = ChainEntry(digest, slot, priority)
            self.store.publish(slot, entry)
            self.chain[digest] = entry
            if self.events is not None:
                self.events.stored(digest, parent, tokens)
        entry.priority = max(entry.priority, priority)
        return entry

    def clear(self) -> None:
        for entry in list(self.chain.values()):
            if not self.store.used_by_cache(entry.slot):
                self._forget(entry.slot)

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
        if self.events is not None:
            assert self.events.held(Tier.DEVICE) == self.chain.keys(), "events and chain disagree"


class CacheV1(TrackedCache):
    """Blocks below index `_published` are in the chain and only read; those behind belong to this cache alone."""

    def __init__(self, ledger: LedgerV1, scope: str, path: Sequence[ChainEntry], priority: int) -> None:
        super().__init__(ledger.tokens_per_block, len(path) * ledger.tokens_per_block, ledger.statistics)
        self._ledger = ledger
        self._priority = priority
        self._published = len(path)
        self._digest = path[-1].digest if path else scope_digest(scope)
        self._table = [entry.slot for entry in path]
        for entry in path:
            ledger.store.hold(entry.slot)
            entry.priority = max(entry.priority, priority)
        ledger.caches.add(self)

    def block_table(self, group: int) -> Sequence[int]:
        return self._table

    def first_block(self, group: int) -> int:
        return 0

    def snapshot(self) -> bool:
        self._check_open()
        return False

    def pin(self) -> BlockHold:
        self._check_open()
        blocks = -(-self._history // self._tokens_per_block)
        return self._keep(HoldKind.PINNED, self._table[:blocks], 0)

    def quarantine(self) -> BlockHold:
        self._check_open()
        self._state = CacheState.CLOSED
        kept = self._table[self._published :]
        del self._table[self._published :]
        hold = self._keep(HoldKind.QUARANTINED, kept, self._published)
        self._give_back()
        return hold

    def _keep(self, kind: HoldKind, slots: list[int], first_block: int) -> TableHold:
        pages = self._ledger.pages
        tables = tuple(
            BlockTable(tuple(slots), pages.generations(group, slots), first_block) for group in range(len(pages.pools))
        )
        held = (HeldSlots(self._ledger.store, slots),)
        return TableHold(tables, SlotHold(kind, held, (first_block,), self._ledger.holds))

    def _grow(self, capacity: int) -> None:
        need = -(-capacity // self._tokens_per_block) - len(self._table)
        if need > 0:
            after = self._table[-1] if self._table else None
            self._table.extend(self._ledger.allocate(need, after))

    def _advanced(self, before: int) -> None:
        """Nothing goes stale: windows are left to the attention mask."""

    def _publish(self, token_ids: Sequence[int], blocks: int) -> int:
        if not self._ledger.reuse:
            return self._committed
        size, store, done = self._tokens_per_block, self._ledger.store, self._published
        packed = array("I", token_ids[done * size : blocks * size])
        for index in range(done, blocks):
            at = (index - done) * size
            mine = self._table[index]
            entry = self._ledger.publish(self._digest, packed[at : at + size], mine, self._priority)
            self._digest, theirs = entry.digest, entry.slot
            if theirs != mine:  # another request was first: use its copy, give ours back (a pin may keep it)
                store.hold(theirs)
                self._table[index] = theirs
                store.drop(mine)
        self._published = blocks
        return blocks * size

    def _give_back(self) -> None:
        for slot in reversed(self._table):
            self._ledger.store.drop(slot)
        self._table.clear()
        self._ledger.caches.remove(self)

    def _park(self) -> bool:
        return False

    def _unpark(self, token_ids: Sequence[int]) -> None:
        raise AssertionError("V1 has no tier to park in")

    def _drop_parked(self) -> None:
        raise AssertionError("V1 has no tier to park in")

    def check_integrity(self) -> None:
        assert 0 <= self._committed <= self._history <= self._capacity
        assert len(self._table) == -(-self._capacity // self._tokens_per_block)
        for index, slot in enumerate(self._table):
            published = self._ledger.store.publication(slot) is not None
            assert published == (index < self._published), "the wrong blocks are published"


class ManagerV1(KVCacheManager):
    """Uniform pools and hash-chain reuse of full blocks. Windows and chunks keep all their blocks here."""

    version = "V1"
    core = "python"

    def __init__(self, layouts: Sequence[KVLayout], nbytes: int, options: CacheOptions) -> None:
        """options.core: there is one only; a worker's setting may say otherwise, because it is V2's."""
        for setting, tier_nbytes in (("host_bytes", options.host_bytes), ("disk_bytes", options.disk_bytes)):
            if tier_nbytes:
                raise ConfigError(
                    f"kv_cache.{setting} is {tier_nbytes}, but manager V1 has no tiers below its pools: "
                    "set it to 0, or kv_cache.manager to V2",
                    field=f"kv_cache.{setting}",
                )
        tokens_per_block = check_layouts(self.version, layouts)
        num_blocks = blocks_for_budget(layouts, nbytes)
        self._pools = tuple(build_pool(layout, num_blocks, options.device, options.allocate) for layout in layouts)
        self._events = KVEventLog(options.event_capacity) if options.event_capacity else None
        pages = Pages(self._pools, options.debug)
        self._ledger = LedgerV1(num_blocks, tokens_per_block, pages, options.prefix_reuse, self._events)

    @property
    def pools(self) -> tuple[KVPool, ...]:
        return self._pools

    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        return len(self._ledger.find(scope, token_ids, len(token_ids))) * self._ledger.tokens_per_block

    def open(
        self, scope: str, token_ids: Sequence[int], *, max_reuse: int, priority: int = 0, min_partial: int = 0
    ) -> KVCache:
        """V1 reuses whole blocks only, whatever `min_partial` says."""
        if max_reuse < 0:
            raise CacheStateError(f"max_reuse must be at least 0 tokens, got {max_reuse}")
        cache = CacheV1(self._ledger, scope, self._ledger.find(scope, token_ids, max_reuse), priority)
        self._ledger.statistics.opened_one(len(token_ids), cache.reused)
        return cache

    def can_reserve(self, tokens: int) -> bool:
        return -(-tokens // self._ledger.tokens_per_block) <= self._ledger.store.available

    def max_tokens(self) -> int:
        return (self._ledger.store.num_slots - len(self._ledger.withheld)) * self._ledger.tokens_per_block

    def resize(self, nbytes: int) -> None:
        blocks = withheld_blocks([pool.layout for pool in self._pools], nbytes, self._ledger.store.num_slots)
        self._ledger.withhold(blocks)

    def counts(self) -> BlockCounts:
        """Slots of all pools: a block counts once per layer group."""
        store, pools = self._ledger.store, len(self._pools)
        return BlockCounts(
            total=(store.num_slots - len(self._ledger.withheld)) * pools,
            free=store.available * pools,
            cached=len(store.cached) * pools,
            pinned=store.pinned * pools,
            quarantined=store.quarantined * pools,
        )

    def statistics(self) -> CacheStatistics:
        return replace(self._ledger.statistics)

    def tier_counts(self) -> tuple[TierCounts, ...]:
        return ()

    @property
    def events(self) -> KVEventLog | None:
        return self._events

    def clear_reuse(self) -> None:
        self._ledger.clear()

    def close(self) -> None:
        """Nothing works in the background."""

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
