"""Manager V1: every layer keeps every block, so one block id stands for the same slot in every pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvferry.core import BlockCounts, BlockTable, KVLayout, block_digest, scope_digest
from kvferry.kvcache.base import BlockHold, CacheStateError, KVCache, KVCacheManager, KVPool, OutOfBlocksError
from kvferry.kvcache.groups import check_layouts
from kvferry.kvcache.holds import HeldSlots, HoldKind, SlotHold
from kvferry.kvcache.lengths import TrackedCache
from kvferry.kvcache.pool import Allocate, Pages, blocks_for_budget, build_pool
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

    def __init__(self, num_blocks: int, tokens_per_block: int, pages: Pages, reuse: bool) -> None:
        self.store = SlotStore(num_blocks)
        self.tokens_per_block = tokens_per_block
        self.pages = pages
        self.reuse = reuse
        self.chain: dict[bytes, ChainEntry] = {}
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

    def publish(self, digest: bytes, slot: int, priority: int) -> ChainEntry:
        """The entry of `digest`, made of `slot` if there is none."""
        entry = self.chain.get(digest)
        if entry is None:
            entry = ChainEntry(digest, slot, priority)
            self.store.publish(slot, entry)
            self.chain[digest] = entry
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

    def check_integrity(self) -> None:
        holders: dict[int, int] = {}
        for cache in self.caches:
            cache.check_integrity()
        tables = [cache.block_table(0) for cache in self.caches]
        tables += [part.slots for hold in self.holds for part in hold.held]
        for table in tables:
            for slot in table:
                holders[slot] = holders.get(slot, 0) + 1
        self.store.check_integrity(holders)
        assert self.store.num_published == len(self.chain)
        for digest, entry in self.chain.items():
            assert entry.digest == digest
            assert self.store.publication(entry.slot) is entry


class CacheV1(TrackedCache):
    """Blocks below index `_published` are in the chain and only read; those behind belong to this cache alone."""

    def __init__(self, ledger: LedgerV1, scope: str, path: Sequence[ChainEntry], priority: int) -> None:
        super().__init__(ledger.tokens_per_block, len(path) * ledger.tokens_per_block)
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

    def pin(self) -> BlockHold:
        self._check_open()
        blocks = -(-self._history // self._tokens_per_block)
        return self._keep(HoldKind.PINNED, self._table[:blocks], 0)

    def quarantine(self) -> BlockHold:
        self._check_open()
        self._closed = True
        kept = self._table[self._published :]
        del self._table[self._published :]
        hold = self._keep(HoldKind.QUARANTINED, kept, self._published)
        self._give_back()
        return hold

    def _keep(self, kind: HoldKind, slots: list[int], first_block: int) -> SlotHold:
        pages = self._ledger.pages
        tables = tuple(
            BlockTable(tuple(slots), pages.generations(group, slots), first_block) for group in range(len(pages.pools))
        )
        return SlotHold(kind, tables, (HeldSlots(self._ledger.store, slots),), self._ledger.holds)

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
            self._digest = block_digest(self._digest, packed[at : at + size])
            mine = self._table[index]
            theirs = self._ledger.publish(self._digest, mine, self._priority).slot
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
        self._ledger = LedgerV1(num_blocks, tokens_per_block, Pages(self._pools, debug), prefix_reuse)

    @property
    def pools(self) -> tuple[KVPool, ...]:
        return self._pools

    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        return len(self._ledger.find(scope, token_ids, len(token_ids))) * self._ledger.tokens_per_block

    def open(self, scope: str, token_ids: Sequence[int], *, max_reuse: int, priority: int = 0) -> KVCache:
        if max_reuse < 0:
            raise CacheStateError(f"max_reuse must be at least 0 tokens, got {max_reuse}")
        return CacheV1(self._ledger, scope, self._ledger.find(scope, token_ids, max_reuse), priority)

    def can_reserve(self, tokens: int) -> bool:
        return -(-tokens // self._ledger.tokens_per_block) <= self._ledger.store.available

    def max_tokens(self) -> int:
        return self._ledger.store.num_slots * self._ledger.tokens_per_block

    def counts(self) -> BlockCounts:
        """Slots of all pools: a block counts once per layer group."""
        store, pools = self._ledger.store, len(self._pools)
        return BlockCounts(
            total=store.num_slots * pools,
            free=store.available * pools,
            cached=len(store.cached) * pools,
            pinned=store.pinned * pools,
            quarantined=store.quarantined * pools,
        )

    def clear_reuse(self) -> None:
        self._ledger.clear()

    def check_integrity(self) -> None:
        self._ledger.check_integrity()
