"""Manager V2: a pool per layer group, a prefix tree over all of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core import BlockCounts, KVLayout
from kvferry.kvcache.base import CacheStateError, KVCache, KVCacheManager, KVPool
from kvferry.kvcache.cache_v2 import CacheV2
from kvferry.kvcache.groups import LayerGroup, check_layouts
from kvferry.kvcache.ledger_v2 import LedgerV2
from kvferry.kvcache.pool import Allocate, Pages, blocks_for_budget, build_pool
from kvferry.kvcache.slots import SlotStore


class ManagerV2(KVCacheManager):
    """Full attention, sliding windows, chunks and MLA latents, each group with slots of its own size.

    A prefix is reused as far as every group can serve it. Stale blocks of a window leave a cache at once and
    stay findable until evicted.
    """

    version = "V2"
    core = "python"

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        nbytes: int,
        *,
        prefix_reuse: bool = True,
        device: str = "cpu",
        debug: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        tokens_per_block = check_layouts(self.version, layouts)
        num_blocks = blocks_for_budget(layouts, nbytes)
        self._pools = tuple(build_pool(layout, num_blocks, device, allocate) for layout in layouts)
        groups = [LayerGroup(index, layout, SlotStore(num_blocks)) for index, layout in enumerate(layouts)]
        self._ledger = LedgerV2(groups, tokens_per_block, Pages(self._pools, debug), prefix_reuse)

    @property
    def pools(self) -> tuple[KVPool, ...]:
        return self._pools

    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        return len(self._ledger.tree.find(scope, token_ids, len(token_ids))) * self._ledger.tokens_per_block

    def open(self, scope: str, token_ids: Sequence[int], *, max_reuse: int, priority: int = 0) -> KVCache:
        if max_reuse < 0:
            raise CacheStateError(f"max_reuse must be at least 0 tokens, got {max_reuse}")
        tree = self._ledger.tree
        return CacheV2(self._ledger, tree.root(scope), tree.find(scope, token_ids, max_reuse), priority)

    def can_reserve(self, tokens: int) -> bool:
        return all(group.layout.blocks_for(tokens) <= group.store.available for group in self._ledger.groups)

    def max_tokens(self) -> int:
        return min(pool.num_blocks for pool in self._pools) * self._ledger.tokens_per_block

    def counts(self) -> BlockCounts:
        return self._ledger.counts()

    def clear_reuse(self) -> None:
        self._ledger.tree.clear()

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
