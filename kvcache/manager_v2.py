"""Manager V2: a pool per layer group, a prefix tree over all of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvferry.core import BlockCounts, ConfigError, KVLayout, scope_digest
from kvferry.kvcache.base import (
    CacheStateError,
    CacheStatistics,
    KVCache,
    KVCacheManager,
    KVPool,
    OutOfBlocksError,
    TierCounts,
)
from kvferry.kvcache.cache_v2 import CacheV2, SharedV2
from kvferry.kvcache.core_v2 import CORES, CoreCache
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.groups import check_layouts, rules_of
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.pool import Pages, blocks_for_budget, build_pool, slot_counts, withheld_blocks
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
        num_blocks = blocks_for_budget(layouts, nbytes)
        rules = rules_of(layouts, tokens_per_block)
        slots = slot_counts(layouts, num_blocks)
        self.core = options.core
        self.takes_snapshots = options.prefix_reuse and any(rule.is_state for rule in rules)
        self._num_blocks = num_blocks
        self._pools = tuple(
            build_pool(layout, count, options.device, options.allocate)
            for layout, count in zip(layouts, slots, strict=True)
        )
        self._events = KVEventLog(options.event_capacity) if options.event_capacity else None
        host = build_tiers(layouts, tokens_per_block, options, self._events)
        journal = host is not None or self._events is not None
        ledger = build_core(rules, slots, options.prefix_reuse, journal)
        self._books = TieredBooks(
            ledger, Pages(self._pools, options.debug, options.page_log), rules, host, self._events
        )
        self._shared = SharedV2(self._books, tokens_per_block, options.prefix_reuse)
        self._withheld = self._open_ballast()

    @property
    def pools(self) -> tuple[KVPool, ...]:
        return self._pools

    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        if not self._shared.reuse:
            return 0
        return self._books.match(scope_digest(scope), array("I", token_ids)) * self._shared.tokens_per_block

    def open(
        self, scope: str, token_ids: Sequence[int], *, max_reuse: int, priority: int = 0, min_partial: int = 0
    ) -> KVCache:
        if max_reuse < 0:
            raise CacheStateError(f"max_reuse must be at least 0 tokens, got {max_reuse}")
        tokens = array("I", token_ids[:max_reuse] if self._shared.reuse else ())
        cache = CacheV2(self._shared, scope_digest(scope), tokens, priority)
        if min_partial and self._shared.reuse:
            size = self._shared.tokens_per_block
            cache.begin_block(tokens[cache.reused : cache.reused + size], min_partial)
        self._shared.statistics.opened_one(len(token_ids), cache.reused)
        return cache

    def can_reserve(self, tokens: int) -> bool:
        blocks = -(-tokens // self._shared.tokens_per_block)
        return all(
            (min(blocks, 1) if rule.is_state else blocks) <= self._books.ledger.available(group)
            for group, rule in enumerate(self._books.rules)
        )

    def max_tokens(self) -> int:
        return (self._num_blocks - self._withheld_blocks) * self._shared.tokens_per_block

    def counts(self) -> BlockCounts:
        total, *others = self._books.ledger.counts()
        return BlockCounts(total - sum(len(self._withheld.table(group)) for group in range(len(self._pools))), *others)

    @property
    def _withheld_blocks(self) -> int:
        return max(len(self._withheld.table(group)) for group in range(len(self._pools)))

    def resize(self, nbytes: int) -> None:
        layouts = [pool.layout for pool in self._pools]
        blocks = withheld_blocks(layouts, nbytes, self._num_blocks)
        if blocks < self._withheld_blocks:
            self._books.close(self._withheld)
            self._withheld = self._open_ballast()
        shortage = self._withheld.shortage(blocks)
        if shortage is not None:
            raise OutOfBlocksError(
                f"{shortage[1]} more KV blocks would have to be free to shrink to {nbytes} bytes, {shortage[2]} are: "
                "try again when fewer requests are running",
                field="kv_cache.bytes",
            )
        self._books.grow(self._withheld, blocks)

    def _open_ballast(self) -> CoreCache:
        """A cache that nobody uses: what it holds is withheld from everybody."""
        return self._books.ledger.open(scope_digest(f"withheld {id(self)}"), array("I"), 0)

    def statistics(self) -> CacheStatistics:
        return replace(self._shared.statistics)

    def tier_counts(self) -> tuple[TierCounts, ...]:
        return self._books.host.counts() if self._books.host is not None else ()

    @property
    def events(self) -> KVEventLog | None:
        return self._events

    def clear_reuse(self) -> None:
        self._books.clear()

    def close(self) -> None:
        if self._books.host is not None:
            self._books.host.close()

    def check_integrity(self) -> None:
        for cache in self._shared.caches:
            cache.check_integrity()
        self._books.check_integrity()
