"""One request's cache under manager V2: lengths and memory here, block tables in the core."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core import BlockTable, KVLayout
from kvferry.kvcache.base import BlockHold, OutOfBlocksError
from kvferry.kvcache.core_v2 import CoreCache, CoreHold, CoreLedger
from kvferry.kvcache.holds import TableHold
from kvferry.kvcache.lengths import TrackedCache
from kvferry.kvcache.pool import Pages


@dataclass(slots=True)
class SharedV2:
    """What a manager and its caches share. reuse False: nothing is published, every cache starts empty."""

    ledger: CoreLedger
    pages: Pages
    layouts: tuple[KVLayout, ...]
    tokens_per_block: int
    reuse: bool
    has_windows: bool
    caches: set[CacheV2] = field(default_factory=set)


class CacheV2(TrackedCache):
    def __init__(self, shared: SharedV2, core: CoreCache, reused: int) -> None:
        super().__init__(shared.tokens_per_block, reused)
        self._shared = shared
        self._core = core
        self._tables = tuple(core.table(group) for group in range(len(shared.layouts)))
        shared.caches.add(self)

    def block_table(self, group: int) -> Sequence[int]:
        return self._tables[group]

    def first_block(self, group: int) -> int:
        return self._core.first_block(group)

    def pin(self) -> BlockHold:
        self._check_open()
        return self._hold(self._core.pin(self._blocks(self._history)))

    def quarantine(self) -> BlockHold:
        self._check_open()
        self._closed = True
        self._shared.caches.remove(self)
        return self._hold(self._core.quarantine())

    def _hold(self, core: CoreHold) -> TableHold:
        pages = self._shared.pages
        tables = tuple(
            BlockTable(tuple(slots), pages.generations(group, slots), first)
            for group, (slots, first) in enumerate(zip(core.slots, core.first_blocks, strict=True))
        )
        return TableHold(tables, core)

    def _grow(self, capacity: int) -> None:
        blocks = self._blocks(capacity)
        if blocks == self._blocks(self._capacity):
            return
        shortage = self._core.shortage(blocks)
        if shortage is not None:
            raise self._out_of_blocks(*shortage)
        for group, slots in enumerate(self._core.grow(blocks)):
            if slots:
                self._shared.pages.claim(group, slots)

    def _out_of_blocks(self, group: int, needed: int, available: int) -> OutOfBlocksError:
        return OutOfBlocksError(
            f"{needed} more KV blocks are needed in layer group {group} ({self._shared.layouts[group].kind.value}), "
            f"{available} of {self._shared.pages.pools[group].num_blocks} are free: "
            "wait, preempt, or raise kv_cache.bytes",
            field="kv_cache.bytes",
        )

    def _advanced(self, before: int) -> None:
        if self._shared.has_windows:
            self._core.advance(before, self._history)

    def _publish(self, token_ids: Sequence[int], blocks: int) -> int:
        if not self._shared.reuse:
            return self._committed
        full = blocks * self._tokens_per_block
        self._core.publish(array("I", token_ids[self._committed : full]), blocks, self._history)
        return full

    def _give_back(self) -> None:
        self._core.close()
        self._shared.caches.remove(self)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._tokens_per_block)

    def check_integrity(self) -> None:
        assert 0 <= self._committed <= self._history <= self._capacity
        self._core.check_integrity(self._history, self._blocks(self._capacity))
