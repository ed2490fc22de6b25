"""Manager V2: a pool per layer group, a prefix tree over all of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvferry.core import BlockCounts, CacheStatistics, ConfigError, KVLayout, TierCounts, scope_digest
from kvferry.kvcache.base import (
    CacheStateError,
    KVCache,
    KVCacheManager,
    KVPool,
)
from kvferry.kvcache.cache_v2 import CacheV2, SharedV2
from kvferry.kvcache.core_v2 import CORES
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.flights import Flights
from kvferry.kvcache.groups import check_layouts, rules_of
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.pool import Pages, blocks_for_budget, build_buffer, build_pool, slot_counts
from kvferry.kvcache.shares import FixedShares, PoolShares, SlabShares, shareable, slab_nbytes
from kvferry.kvcache.tiering import TieredBooks, build_tiers


class ManagerV2(KVCacheManager):
    """Full attention, sliding windows, chunks, MLA latents and states, each group with slots of its own size.

    A prefix is reused as far as every group can serve it. Stale blocks of a window leave a cache at once and
    stay findable until evicted. The books are kept by a core, `cpp` or `python`.
    """

    version = "V2"

    def __init__(self, layouts: Sequence[KVLayout], nbytes: int, options: CacheOptions) -> None:
        if options.connector is not None:
            raise ConfigError(
                "manager V2 serves no external KV connector: leave kv_cache.connector out, or set kv_cache.manager to "
                "auto or V1",
                field="kv_cache.connector",
            )
        build_core = CORES.get(options.core)
        tokens_per_block = check_layouts(layouts)
        num_blocks = blocks_for_budget(layouts, nbytes, typical_tokens=options.typical_tokens)
        rules = rules_of(layouts, tokens_per_block)
        slots = slot_counts(layouts, num_blocks, options.typical_tokens)
        self.core = options.core
        self.takes_snapshots = options.prefix_reuse and any(rule.is_state for rule in rules)
        shared = None
        # Other ranks lay their pools out by themselves, group by group.
        alone = options.page_log is None
        if options.typical_tokens is not None and alone and shareable(layouts, rules, nbytes):
            nbytes -= nbytes % slab_nbytes(layouts)
            slots = [nbytes // layout.slot_nbytes for layout in layouts]
            shared = build_buffer(nbytes, options.device, options.allocate, options.debug)
        self._pools = tuple(
            build_pool(layout, count, options.device, options.allocate, options.debug, shared)
            for layout, count in zip(layouts, slots, strict=True)
        )
        self._events = KVEventLog(options.event_capacity) if options.event_capacity else None
        host = build_tiers(layouts, tokens_per_block, options, self._events)
        journal = host is not None or self._events is not None
        per_slab = [slab_nbytes(layouts) // layout.slot_nbytes if shared else 0 for layout in layouts]
        ledger = build_core(rules, slots, options.prefix_reuse, journal, per_slab)
        flights = Flights(options.copier if host is not None else None)
        pages = Pages(self._pools, options.debug, options.page_log)
        self._books = TieredBooks(ledger, pages, rules, host, self._events, flights)
        self._shares: PoolShares
        if shared is None:
            self._shares = FixedShares(self._books, layouts, num_blocks, options.typical_tokens)
        else:
            typical = options.typical_tokens or 0
            self._shares = SlabShares(self._books, layouts, rules, nbytes, typical, options.step_tokens)
        self._shared = SharedV2(self._books, self._shares, tokens_per_block, options.prefix_reuse)

    @property
    def pools(self) -> tuple[KVPool, ...]:
        return self._pools

    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        if not self._shared.reuse:
            return 0
        return self._books.match(scope_digest(scope), array("I", token_ids)) * self._shared.tokens_per_block

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
        if max_reuse < 0:
            raise CacheStateError(f"max_reuse must be at least 0 tokens, got {max_reuse}")
        tokens = array("I", token_ids[:max_reuse] if self._shared.reuse else ())
        loaded = len(tokens) if loads else 0
        cache = CacheV2(self._shared, scope_digest(scope), tokens, priority, loaded)
        if min_partial and self._shared.reuse and not cache.lacks_windows:
            size = self._shared.tokens_per_block
            cache.begin_block(tokens[cache.reused : cache.reused + size], min_partial)
        self._shared.statistics.opened_one(len(token_ids), cache.reused)
        return cache

    def prefetch(self, scope: str, token_ids: Sequence[int]) -> bool:
        return not self._shared.reuse or self._books.prefetch(scope_digest(scope), array("I", token_ids))

    def poll(self, wait_s: float = 0.0) -> bool:
        return self._books.poll(wait_s)

    @property
    def releasing(self) -> bool:
        return self._books.flights.releasing

    def can_reserve(self, tokens: int, ahead: int | None = None) -> bool:
        size = self._shared.tokens_per_block
        blocks = -(-tokens // size)
        near = blocks if ahead is None else -(-min(tokens, ahead) // size)
        needs = [min(blocks, 1) if rule.is_state else near if rule.is_window else blocks for rule in self._books.rules]
        return self._shares.could(needs)

    def max_tokens(self) -> int:
        return self._shares.max_tokens()

    def counts(self) -> BlockCounts:
        return BlockCounts(*self._books.ledger.counts())

    def group_counts(self) -> tuple[BlockCounts, ...]:
        return tuple(BlockCounts(*self._books.ledger.counts(group)) for group in range(len(self._pools)))

    def resize(self, nbytes: int) -> None:
        self._shares.resize(nbytes)

    def statistics(self) -> CacheStatistics:
        books = self._books
        return replace(
            self._shared.statistics,
            restored_tokens=books.restored_blocks * self._shared.tokens_per_block,
            evicted_blocks=books.ledger.evicted,
            copied_at_once=books.copied_at_once,
            copied_ahead=books.copied_ahead,
            moved_shares=self._shares.moved,
        )

    def tier_counts(self) -> tuple[TierCounts, ...]:
        return self._books.host.counts() if self._books.host is not None else ()

    @property
    def events(self) -> KVEventLog | None:
        return self._events

    def clear_reuse(self) -> None:
        self._books.clear()

    def close(self) -> None:
        self._books.end()

    def check_integrity(self) -> None:
        for cache in self._shared.caches:
            cache.check_integrity()
        self._books.check_integrity()
        self._books.pages.check_integrity()
