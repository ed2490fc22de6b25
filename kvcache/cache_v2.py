"""One request's cache under manager V2: lengths and memory here, block tables in the core."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core import BlockTable, CacheStatistics
from kvferry.kvcache.base import BlockHold, CacheLostError, CacheStateError, OutOfBlocksError
from kvferry.kvcache.core_v2 import CoreHold
from kvferry.kvcache.holds import TableHold
from kvferry.kvcache.lengths import CacheState, TrackedCache
from kvferry.kvcache.shares import PoolShares
from kvferry.kvcache.suspension import Suspended, suspend
from kvferry.kvcache.tiering import TieredBooks


@dataclass(frozen=True, slots=True)
class SharedV2:
    """What a manager and its caches share. reuse False: nothing is published, every cache starts empty."""

    books: TieredBooks
    shares: PoolShares
    tokens_per_block: int
    reuse: bool
    caches: set[CacheV2] = field(default_factory=set)
    statistics: CacheStatistics = field(default_factory=CacheStatistics)

    @property
    def has_windows(self) -> bool:
        return any(rule.is_window for rule in self.books.rules)


class CacheV2(TrackedCache):
    def __init__(self, shared: SharedV2, scope: bytes, tokens: array[int], priority: int, loaded: int) -> None:
        """tokens: those whose published blocks it may start with. loaded: the position up to which it is loaded next
        (0: it is not)."""
        self._core = shared.books.open(scope, tokens, priority, loaded)
        reused = self._core.published * shared.tokens_per_block
        super().__init__(shared.tokens_per_block, reused, shared.statistics)
        if self._core.late:
            self._loaded = loaded
            self._near = min([reused, *self._late_starts(shared)])
        self._shared = shared
        self._scope = scope
        self._priority = priority
        self._has_windows = shared.has_windows
        self._parked: Suspended | None = None
        self._tables = self._views()
        shared.caches.add(self)

    def begin_block(self, tokens: array[int], least: int) -> None:
        """Right after opening: reuses what a published block has in common with `tokens`, which follow history."""
        self._reused += self._shared.books.begin_block(self._core, tokens, least)
        self._history = self._capacity = self._near = self._reused
        self._advanced(self._history)

    def _late_starts(self, shared: SharedV2) -> list[int]:
        """The position from which each window is to be loaded."""
        windows = [group for group, rule in enumerate(shared.books.rules) if rule.is_window]
        return [self._core.first_block(group) * shared.tokens_per_block for group in windows]

    @property
    def lacks_windows(self) -> bool:
        return self._core.late

    def _views(self) -> tuple[Sequence[int], ...]:
        return tuple(self._core.table(group) for group in range(len(self._shared.books.rules)))

    def block_table(self, group: int) -> Sequence[int]:
        return self._tables[group]

    def first_block(self, group: int) -> int:
        return self._parked.first_blocks[group] if self._parked else self._core.first_block(group)

    def snapshot(self) -> bool:
        self._check_open()
        self._check_loaded()
        if self._history != self._committed or not self._history:
            raise CacheStateError(
                f"snapshot: history is {self._history} tokens, {self._committed} are committed: only the end of a "
                "committed block has a place in the prefix index"
            )
        return self._shared.books.snapshot(self._core)

    def pin(self) -> BlockHold:
        self._check_open()
        if self._core.late:
            self._check_loaded()  # positions below history have pages that nothing is in yet
        return self._hold(self._core.pin(self._blocks(self._history)))

    def quarantine(self) -> BlockHold:
        self._check_open()
        self._state = CacheState.CLOSED
        self._shared.caches.remove(self)
        return self._hold(self._shared.books.quarantine(self._core))

    def _hold(self, core: CoreHold) -> TableHold:
        pages = self._shared.books.pages
        tables = tuple(
            BlockTable(tuple(slots), pages.generations(group, slots), first)
            for group, (slots, first) in enumerate(zip(core.slots, core.first_blocks, strict=True))
        )
        return TableHold(tables, core)

    def _grow(self, capacity: int, near: int, loaded: int) -> None:
        blocks, near_blocks = self._blocks(capacity), self._blocks(near)
        if blocks == self._blocks(self._capacity) and near_blocks == self._blocks(self._near):
            return
        shortage = self._core.shortage(blocks, near_blocks, loaded)
        if shortage is not None and not self._shared.shares.relieve(self._core.needs(blocks, near_blocks, loaded)):
            raise self._out_of_blocks(*shortage)
        if loaded:
            self._core.advance(loaded, loaded)  # a window starts where the loaded prefix needs it to
        self._shared.books.grow(self._core, blocks, near_blocks)

    def _out_of_blocks(self, group: int, needed: int, available: int) -> OutOfBlocksError:
        pool = self._shared.books.pages.pools[group]
        return OutOfBlocksError(
            f"{needed} more KV blocks are needed in layer group {group} ({pool.layout.kind.value}), "
            f"{available} are free: wait, preempt, or raise kv_cache.bytes",
            field="kv_cache.bytes",
        )

    def _advanced(self, before: int) -> None:
        if self._has_windows:
            self._core.advance(before, self._history)

    def _publish(self, token_ids: Sequence[int], blocks: int) -> int:
        if not self._shared.reuse:
            return self._committed
        full = blocks * self._tokens_per_block
        tokens = array("I", token_ids[self._committed : full])
        self._shared.books.publish(self._core, tokens, blocks, self._history)
        return full

    def _park(self) -> bool:
        if self._core.late:  # its windows may hold less than whole blocks, and cannot be published when it comes back
            return False
        self._parked = suspend(self._shared.books, self._core, self._history)
        return self._parked is not None

    @property
    def resuming(self) -> bool:
        return self._parked is not None and self._parked.rising

    def _prepare_unpark(self, token_ids: Sequence[int]) -> bool:
        assert self._parked is not None
        if not self._parked.rising:
            if not self._parked.prepare():
                return False
            if not self._shared.books.flights.background:
                return True
            try:
                self._rise(array("I", token_ids[: self._committed]))
            except (OutOfBlocksError, CacheLostError):
                return True  # nothing can be prepared, and `_unpark` will say why
        return self._parked.risen

    def _unpark(self, token_ids: Sequence[int]) -> None:
        assert self._parked is not None
        tokens = array("I", token_ids[: self._committed])
        if not self._parked.rising:
            self._rise(tokens)
        self._core, self._parked = self._parked.end(tokens, self._history), None
        self._tables = self._views()

    def _rise(self, tokens: array[int]) -> None:
        """Gives it pages and starts copying; `tokens` are the committed ones."""
        assert self._parked is not None
        core = self._shared.books.ledger.open(self._scope, tokens, self._priority, 0)
        shortage = self._parked.rise(core, self._history, self._shared.shares.relieve)
        if shortage is not None:
            raise self._out_of_blocks(*shortage)

    def _drop_parked(self) -> None:
        assert self._parked is not None
        self._parked.drop()
        self._shared.caches.remove(self)

    def _give_back(self) -> None:
        self._shared.books.close(self._core)
        self._shared.caches.remove(self)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._tokens_per_block)

    def check_integrity(self) -> None:
        assert 0 <= self._committed <= self._history <= self._capacity
        if self._parked is None:
            history = max(self._history, self._loaded)
            self._core.check_integrity(history, self._blocks(self._capacity), self._blocks(self._near))
        else:
            assert not any(self._tables), "a suspended cache holds a page"
