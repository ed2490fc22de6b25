"""Manager V1 for models with recurrent states: V1 as it is for the attention groups, beside it one state per request.

There are no snapshots, so no prefix can be reused, and no tier below: who must make way is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvferry.core import BlockCounts, BlockTable, CacheStatistics, ConfigError, KVLayout, TierCounts
from kvferry.kvcache.base import (
    BlockHold,
    KVCache,
    KVCacheManager,
    KVPool,
    OutOfBlocksError,
)
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.groups import check_layouts
from kvferry.kvcache.holds import HeldSlots, HoldKind, SlotHold, TableHold
from kvferry.kvcache.manager_v1 import ManagerV1
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.pool import Pages, blocks_for_budget, blocks_per_state, build_pool, state_slots
from kvferry.kvcache.slots import SlotStore


@dataclass(slots=True)
class StateBooks:
    """Who has which state. A request's slot is the same one in every state group, as V1's blocks are. groups: where
    the state groups stand among all of them, in the order of `pages`."""

    groups: Sequence[int]
    pages: Pages
    store: SlotStore
    withheld: list[int] = field(default_factory=list)
    caches: set[HybridCacheV1] = field(default_factory=set)
    holds: set[SlotHold] = field(default_factory=set)
    refused: int = 0

    @property
    def total(self) -> int:
        return self.store.num_slots - len(self.withheld)

    def take(self) -> int:
        """A slot of zeros: what a sequence starts from. The caller knows that one is available."""
        (slot,) = self.store.take(1, None)
        for index in range(len(self.groups)):
            self.pages.claim(index, [slot])
            self.pages.zero(index, slot)
        return slot

    def check_available(self, needed: int = 1) -> None:
        if self.store.available < needed:
            raise OutOfBlocksError(
                f"{needed} more states are needed, {self.store.available} of {self.store.num_slots} are free: wait, "
                "preempt, or raise kv_cache.bytes",
                field="kv_cache.bytes",
            )

    def withhold(self, slots: int) -> None:
        """Keeps `slots` slots from everybody, more or fewer than before. Ask `check_available` first."""
        while len(self.withheld) > slots:
            self.store.drop(self.withheld.pop())
        self.withheld += self.store.take(slots - len(self.withheld), None)

    def hold(self, kind: HoldKind, slots: list[int]) -> TableHold:
        tables = tuple(
            BlockTable(tuple(slots), self.pages.generations(index, slots), 0) for index in range(len(self.groups))
        )
        return TableHold(tables, SlotHold(kind, (HeldSlots(self.store, slots),), (0,), self.holds))

    def in_order(self, attention: Sequence[BlockTable], states: Sequence[BlockTable]) -> tuple[BlockTable, ...]:
        """The tables of all groups, in the order of the layouts."""
        tables = list(attention)
        for group, table in zip(self.groups, states, strict=True):
            tables.insert(group, table)
        return tuple(tables)

    def check_integrity(self) -> None:
        holders: dict[int, int] = {}
        tables = [cache.state for cache in self.caches]
        tables += [list(part.slots) for hold in self.holds for part in hold.held]
        for table in [*tables, self.withheld]:
            for slot in table:
                holders[slot] = holders.get(slot, 0) + 1
        self.store.check_integrity(holders)
        for cache in self.caches:
            assert len(cache.state) == (cache.capacity > 0), "a request has one state, from its first reservation on"


class HybridHold(BlockHold):
    """A hold on a request's blocks and one on its state."""

    def __init__(self, books: StateBooks, blocks: BlockHold, state: BlockHold) -> None:
        self._tables = books.in_order(blocks.tables, state.tables)
        self._parts = (blocks, state)

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return self._tables

    def release(self) -> None:
        for part in self._parts:
            part.release()


class HybridCacheV1(KVCache):
    """A V1 cache and, from its first reservation on, a state. state: its slot, or nothing yet."""

    def __init__(self, books: StateBooks, blocks: KVCache) -> None:
        self._books = books
        self._blocks = blocks
        self.state: list[int] = []
        books.caches.add(self)

    @property
    def committed(self) -> int:
        return self._blocks.committed

    @property
    def history(self) -> int:
        return self._blocks.history

    @property
    def capacity(self) -> int:
        return self._blocks.capacity

    @property
    def reused(self) -> int:
        return self._blocks.reused

    @property
    def lacks_windows(self) -> bool:
        return False

    def reserve(self, capacity: int, *, loaded: int = 0, ahead: int | None = None) -> None:
        lacking = capacity > 0 and not self.state and self in self._books.caches
        if lacking:
            try:
                self._books.check_available()
            except OutOfBlocksError:
                self._books.refused += 1
                raise
        self._blocks.reserve(capacity, loaded=loaded, ahead=ahead)
        if lacking:
            self.state.append(self._books.take())

    def advance(self, history: int) -> None:
        self._blocks.advance(history)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._blocks.commit(token_ids)

    def keep_private(self) -> None:
        self._blocks.keep_private()

    def snapshot(self) -> bool:
        return self._blocks.snapshot()

    def block_table(self, group: int) -> Sequence[int]:
        if group in self._books.groups:
            return self.state
        return self._blocks.block_table(group - sum(state < group for state in self._books.groups))

    def first_block(self, group: int) -> int:
        return 0

    def pin(self) -> BlockHold:
        blocks = self._blocks.pin()
        return HybridHold(self._books, blocks, self._books.hold(HoldKind.PINNED, list(self.state)))

    def quarantine(self) -> BlockHold:
        blocks = self._blocks.quarantine()
        state, self.state = self.state, []
        self._books.caches.remove(self)
        return HybridHold(self._books, blocks, self._books.hold(HoldKind.QUARANTINED, state))

    @property
    def suspended(self) -> bool:
        return self._blocks.suspended

    def suspend(self) -> bool:
        return self._blocks.suspend()

    @property
    def resuming(self) -> bool:
        return self._blocks.resuming

    def prepare_resume(self, token_ids: Sequence[int]) -> bool:
        return self._blocks.prepare_resume(token_ids)

    def resume(self, token_ids: Sequence[int]) -> None:
        self._blocks.resume(token_ids)

    def close(self) -> None:
        self._blocks.close()
        self._books.caches.remove(self)
        while self.state:
            self._books.store.drop(self.state.pop())


class HybridManagerV1(KVCacheManager):
    version = ManagerV1.version
    core = ManagerV1.core
    takes_snapshots = False

    def __init__(self, layouts: Sequence[KVLayout], nbytes: int, options: CacheOptions) -> None:
        _refuse_what_needs_snapshots(options)
        check_layouts(layouts)
        self._typical_tokens = options.typical_tokens
        blocks = blocks_for_budget(layouts, nbytes, typical_tokens=options.typical_tokens)
        self._layouts = tuple(layouts)
        attention = [layout for layout in layouts if not layout.kind.is_state]
        self._row_nbytes = sum(layout.slot_nbytes for layout in attention)
        self._blocks = ManagerV1(attention, blocks * self._row_nbytes, options)
        groups = [group for group, layout in enumerate(layouts) if layout.kind.is_state]
        slots = self._state_slots(blocks)
        pools = [build_pool(layouts[group], slots, options.device, options.allocate, options.debug) for group in groups]
        self._states = StateBooks(groups, Pages(pools, options.debug), SlotStore(slots))
        ordered = list(self._blocks.pools)
        for group, pool in zip(groups, pools, strict=True):
            ordered.insert(group, pool)
        self._pools = tuple(ordered)

    def _state_slots(self, blocks: int) -> int:
        return state_slots(blocks, blocks_per_state(self._layouts, self._typical_tokens))

    @property
    def pools(self) -> tuple[KVPool, ...]:
        return self._pools

    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        return self._blocks.match(scope, token_ids)

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
        return HybridCacheV1(self._states, self._blocks.open(scope, token_ids, max_reuse=max_reuse, priority=priority))

    def prefetch(self, scope: str, token_ids: Sequence[int]) -> bool:
        return True

    def poll(self, wait_s: float = 0.0) -> bool:
        return self._blocks.poll(wait_s)

    @property
    def releasing(self) -> bool:
        return self._blocks.releasing

    def can_reserve(self, tokens: int, ahead: int | None = None) -> bool:
        return self._blocks.can_reserve(tokens, ahead) and (tokens == 0 or self._states.store.available > 0)

    def max_tokens(self) -> int:
        return self._blocks.max_tokens()

    def counts(self) -> BlockCounts:
        """Slots of all pools: a block and a state count once per layer group."""
        blocks, states, groups = self._blocks.counts(), self._states, len(self._states.groups)
        return BlockCounts(
            total=blocks.total + states.total * groups,
            free=blocks.free + states.store.available * groups,
            cached=blocks.cached,
            pinned=blocks.pinned + states.store.pinned * groups,
            quarantined=blocks.quarantined + states.store.quarantined * groups,
        )

    def group_counts(self) -> tuple[BlockCounts, ...]:
        store = self._states.store
        state = BlockCounts(self._states.total, store.available, 0, store.pinned, store.quarantined)
        groups = list(self._blocks.group_counts())
        for group in self._states.groups:
            groups.insert(group, state)
        return tuple(groups)

    def resize(self, nbytes: int) -> None:
        blocks = blocks_for_budget(self._layouts, nbytes, typical_tokens=self._typical_tokens)
        withheld = self._states.store.num_slots - self._state_slots(blocks)
        self._states.check_available(withheld - len(self._states.withheld))
        self._blocks.resize(blocks * self._row_nbytes)
        self._states.withhold(withheld)

    def statistics(self) -> CacheStatistics:
        counted = self._blocks.statistics()
        return replace(counted, refused_reservations=counted.refused_reservations + self._states.refused)

    def tier_counts(self) -> tuple[TierCounts, ...]:
        return ()

    @property
    def events(self) -> KVEventLog | None:
        return self._blocks.events

    def clear_reuse(self) -> None:
        """Nothing is ever published."""

    def close(self) -> None:
        self._blocks.close()

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        self._states.check_integrity()
        self._states.pages.check_integrity()


def _refuse_what_needs_snapshots(options: CacheOptions) -> None:
    """Raises ConfigError naming the setting."""
    for setting, given in (
        ("prefix_reuse", options.prefix_reuse),
        ("host_bytes", options.host_bytes),
        ("disk_bytes", options.disk_bytes),
        ("connector", options.connector),
    ):
        if given:
            remedy = "" if setting == "connector" else ", or set kv_cache.manager to V2"  # V2 serves no connector
            raise ConfigError(
                f"kv_cache.{setting} is set, but manager V1 keeps one state per request and no copies of it: "
                f"leave kv_cache.{setting} out{remedy}",
                field=f"kv_cache.{setting}",
            )
