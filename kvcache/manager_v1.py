"""Manager V1: every layer keeps every block, so one block id stands for the same slot in every pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvferry.core import (
    BlockCounts,
    BlockTable,
    CacheStatistics,
    KVLayout,
    TierCounts,
    scope_digest,
)
from kvferry.kvcache.base import (
    BlockHold,
    CacheStateError,
    ForkableCache,
    KVCache,
    KVCacheManager,
    KVPool,
    OutOfBlocksError,
)
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.groups import check_layouts
from kvferry.kvcache.holds import HeldSlots, HoldKind, SlotHold, TableHold
from kvferry.kvcache.ledger_v1 import ChainEntry, LedgerV1
from kvferry.kvcache.lengths import CacheState, TrackedCache
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.parked import Parked
from kvferry.kvcache.pool import Pages, blocks_for_budget, build_pool, withheld_blocks
from kvferry.kvcache.tiering_v1 import build_below


class CacheV1(TrackedCache, ForkableCache):
    """Blocks below index `_published` are in the chain and only read. Those below `_forked` may be shared with forks of
    this sequence and are only read too; those behind both belong to this cache alone.

    Forking sets `_forked` to all blocks and capacity to history. It covers a partly filled last block until `_grow`,
    which every writer must go through, has made that one this cache's own.
    """

    def __init__(self, ledger: LedgerV1, scope: bytes, tokens: array[int], priority: int) -> None:
        """tokens: those whose published blocks it may start with."""
        self._ledger = ledger
        self._scope = scope
        self._priority = priority
        self._parked: Parked | None = None
        path = self._hold_prefix(tokens)
        path += ledger.restore(scope, path, tokens, priority)
        super().__init__(ledger.tokens_per_block, len(path) * ledger.tokens_per_block, ledger.statistics)
        self._start_with(path)
        ledger.caches.add(self)

    def _hold_prefix(self, tokens: array[int]) -> list[ChainEntry]:
        """What the pools hold of `tokens`, which nobody can evict from here on."""
        path = self._ledger.find(self._scope, tokens)
        for entry in path:
            self._ledger.store.hold(entry.slot)
            entry.priority = max(entry.priority, self._priority)
        return path

    def _start_with(self, path: Sequence[ChainEntry]) -> None:
        self._published = len(path)
        self._forked = 0
        self._digest = path[-1].digest if path else self._scope
        self._table = [entry.slot for entry in path]

    def block_table(self, group: int) -> Sequence[int]:
        return self._table

    def first_block(self, group: int) -> int:
        return 0

    def snapshot(self) -> bool:
        self._check_open()
        return False

    def fork(self) -> CacheV1:
        self._check_open()
        self._check_loaded()
        self._drop_table(self._blocks_of_history)
        self._capacity = self._near = self._history
        self._forked = len(self._table)
        twin = CacheV1(self._ledger, self._scope, array("I"), self._priority)
        twin._take_after(self)
        return twin

    def _take_after(self, other: CacheV1) -> None:
        """Becomes, newly opened, what `other` is."""
        self._reused, self._committed = other._reused, other._committed
        self._history = self._capacity = self._near = other._history
        self._published, self._forked, self._digest = other._published, other._forked, other._digest
        self._table = list(other._table)
        for slot in self._table:
            self._ledger.store.hold(slot)

    @property
    def _blocks_of_history(self) -> int:
        return -(-self._history // self._tokens_per_block)

    def pin(self) -> BlockHold:
        self._check_open()
        return self._keep(HoldKind.PINNED, self._table[: self._blocks_of_history], 0)

    def quarantine(self) -> BlockHold:
        self._check_open()
        self._state = CacheState.CLOSED
        first = max(self._published, self._forked)  # nobody can be writing to those before it
        kept = self._table[first:]
        del self._table[first:]
        hold = self._keep(HoldKind.QUARANTINED, kept, first)
        self._give_back()
        return hold

    def _keep(self, kind: HoldKind, slots: list[int], first_block: int) -> TableHold:
        pages = self._ledger.pages
        tables = tuple(
            BlockTable(tuple(slots), pages.generations(group, slots), first_block) for group in range(len(pages.pools))
        )
        held = (HeldSlots(self._ledger.store, slots),)
        return TableHold(tables, SlotHold(kind, held, (first_block,), self._ledger.holds))

    def _grow(self, capacity: int, near: int, loaded: int) -> None:
        need = -(-capacity // self._tokens_per_block) - len(self._table)
        full = self._history // self._tokens_per_block
        copies = self._forked > full and self._ledger.store.cache_holders(self._table[full]) > 1
        if need + copies > 0:
            after = self._table[-1] if self._table else None
            slots = self._ledger.allocate(need + copies, after)
            if copies:
                self._ledger.copy(self._table[full], slots[0])
                self._table[full] = slots.pop(0)
            self._table += slots
        self._forked = min(self._forked, full)

    def _advanced(self, before: int) -> None:
        """Nothing goes stale: windows are left to the attention mask."""

    def _publish(self, token_ids: Sequence[int], blocks: int) -> int:
        if not self._ledger.reuse:
            return self._committed
        size, done = self._tokens_per_block, self._published
        packed = array("I", token_ids[done * size : blocks * size])
        completed: dict[bytes, int] = {}
        for index in range(done, blocks):
            at = (index - done) * size
            mine = self._table[index]
            entry, new = self._ledger.publish(self._digest, packed[at : at + size], mine, self._priority)
            if new:
                completed[entry.digest] = mine
            self._ledger.adopt(entry, mine)
            self._table[index], self._digest = entry.slot, entry.digest
        self._published = blocks
        self._ledger.below.completed(completed)
        return blocks * size

    def _give_back(self) -> None:
        self._drop_table()
        self._ledger.caches.remove(self)

    def _drop_table(self, first: int = 0) -> None:
        """Gives the blocks from index `first` on back, deepest first."""
        for slot in self._table[first:][::-1]:
            self._ledger.store.drop(slot)
        del self._table[first:]

    def _park(self) -> bool:
        self._parked = self._ledger.below.park(self._table[: self._blocks_of_history])
        if self._parked is None:
            return False
        self._drop_table()
        return True

    def _prepare_unpark(self, token_ids: Sequence[int]) -> bool:
        assert self._parked is not None
        return self._parked.prepare()

    def _unpark(self, token_ids: Sequence[int]) -> None:
        assert self._parked is not None
        path = self._hold_prefix(array("I", token_ids[: self._committed]))
        try:
            slots = self._ledger.allocate(self._blocks_of_history - len(path), path[-1].slot if path else None)
        except OutOfBlocksError:
            for entry in reversed(path):
                self._ledger.store.drop(entry.slot)
            raise
        self._ledger.below.unpark(self._parked, len(path), slots)
        self._parked = None
        self._start_with(path)
        self._table += slots
        self._publish(token_ids, self._committed // self._tokens_per_block)

    def _drop_parked(self) -> None:
        assert self._parked is not None
        self._parked.release()
        self._ledger.caches.remove(self)

    def check_integrity(self) -> None:
        assert 0 <= self._committed <= self._history <= self._capacity
        if self._parked is not None:
            assert not self._table, "a suspended cache holds a page"
            return
        assert len(self._table) == -(-self._capacity // self._tokens_per_block)
        assert self._forked * self._tokens_per_block < self._history + self._tokens_per_block
        assert self._forked * self._tokens_per_block <= self._history or self._capacity == self._history
        store = self._ledger.store
        for index, slot in enumerate(self._table):
            if index < self._published:
                assert store.publication(slot) is not None, "a committed block is not published"
            elif index >= self._forked:
                assert store.publication(slot) is None, "an uncommitted block is published"
                assert store.cache_holders(slot) == 1, "a block that may be written has two owners"


class ManagerV1(KVCacheManager):
    """Uniform pools and hash-chain reuse of full blocks. Windows and chunks keep all their blocks here. Models with
    states get a `HybridManagerV1`."""

    version = "V1"
    core = "python"
    takes_snapshots = False

    def __init__(self, layouts: Sequence[KVLayout], nbytes: int, options: CacheOptions) -> None:
        """options.core: there is one only; a worker's setting may say otherwise, because it is V2's."""
        tokens_per_block = check_layouts(layouts)
        num_blocks = blocks_for_budget(layouts, nbytes)
        self._pools = tuple(
            build_pool(layout, num_blocks, options.device, options.allocate, options.debug) for layout in layouts
        )
        self._events = KVEventLog(options.event_capacity) if options.event_capacity else None
        pages = Pages(self._pools, options.debug, options.page_log)
        statistics = CacheStatistics()
        below = build_below(layouts, tokens_per_block, options, pages, self._events, statistics)
        self._ledger = LedgerV1(
            num_blocks, tokens_per_block, pages, below, options.prefix_reuse, self._events, statistics
        )

    @property
    def pools(self) -> tuple[KVPool, ...]:
        return self._pools

    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        return self._ledger.match(scope_digest(scope), array("I", token_ids)) * self._ledger.tokens_per_block

    def open(
        self,
        scope: str,
        token_ids: Sequence[int],
        *,
        max_reuse: int,
        priority: int = 0,
        min_partial: int = 0,
        loads: bool = False,
    ) -> KVCache:
        """V1 reuses whole blocks only, whatever `min_partial` says."""
        if max_reuse < 0:
            raise CacheStateError(f"max_reuse must be at least 0 tokens, got {max_reuse}")
        cache = CacheV1(self._ledger, scope_digest(scope), array("I", token_ids[:max_reuse]), priority)
        self._ledger.statistics.opened_one(len(token_ids), cache.reused)
        return cache

    def prefetch(self, scope: str, token_ids: Sequence[int]) -> bool:
        return True

    def poll(self, wait_s: float = 0.0) -> bool:
        return False

    @property
    def releasing(self) -> bool:
        return False

    def can_reserve(self, tokens: int, ahead: int | None = None) -> bool:
        return -(-tokens // self._ledger.tokens_per_block) <= self._ledger.store.available

    def max_tokens(self) -> int:
        return (self._ledger.store.num_slots - len(self._ledger.withheld)) * self._ledger.tokens_per_block

    def resize(self, nbytes: int) -> None:
        blocks = withheld_blocks([pool.layout for pool in self._pools], nbytes, self._ledger.store.num_slots)
        self._ledger.withhold(blocks)

    def counts(self) -> BlockCounts:
        """Slots of all pools: a block counts once per layer group."""
        return _times(self._block_counts(), len(self._pools))

    def group_counts(self) -> tuple[BlockCounts, ...]:
        return (self._block_counts(),) * len(self._pools)

    def _block_counts(self) -> BlockCounts:
        store = self._ledger.store
        return BlockCounts(
            total=store.num_slots - len(self._ledger.withheld),
            free=store.available,
            cached=len(store.cached),
            pinned=store.pinned,
            quarantined=store.quarantined,
        )

    def statistics(self) -> CacheStatistics:
        return replace(self._ledger.statistics)

    def tier_counts(self) -> tuple[TierCounts, ...]:
        host = self._ledger.below.host
        return host.counts() if host is not None else ()

    @property
    def events(self) -> KVEventLog | None:
        return self._events

    def clear_reuse(self) -> None:
        self._ledger.clear()

    def close(self) -> None:
        self._ledger.below.close()

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
        self._ledger.pages.check_integrity()


def _times(counts: BlockCounts, pools: int) -> BlockCounts:
    return BlockCounts(
        *(pools * getattr(counts, name) for name in ("total", "free", "cached", "pinned", "quarantined"))
    )
