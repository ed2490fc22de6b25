"""Where KV waits in its wire format: a pool beside each of the worker's, whose slots last as long as one transfer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core import AxisOrder, BlockTable, KVLayout, OverloadedError, TokenRange
from kvferry.kvcache import KVPool
from kvferry.kvcache.free_slots import FreeSlots
from kvferry.transceiver.planner import lacks_from
from kvferry.transceiver.wire_format import decode, encode


@dataclass(frozen=True, slots=True)
class WireSlots:
    """Slots of one transfer, per layer group, and which block each begins with."""

    slots: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]


class WirePools:
    """Thread-safe. stored and wire: one of each per layer group."""

    def __init__(self, stored: Sequence[KVPool], wire: Sequence[KVPool]) -> None:
        self._stored = tuple(stored)
        self._wire = tuple(wire)
        self._lock = threading.Lock()
        self._free = [FreeSlots(pool.num_blocks) for pool in wire]

    def take(self, tables: Sequence[BlockTable], tokens: TokenRange) -> WireSlots:
        """A slot for every block of `tables` that a load of `tokens` touches. Raises OverloadedError, nothing taken,
        when there are too few."""
        ranges = [_blocks(pool.layout, table, tokens) for pool, table in zip(self._stored, tables, strict=True)]
        with self._lock:
            for free, blocks in zip(self._free, ranges, strict=True):
                if len(blocks) > len(free):
                    raise OverloadedError(
                        f"{len(blocks)} blocks are to be transferred, and there is room for {len(free)} in their wire "
                        "format (transceiver.wire_format)",
                        retry_after_s=0.1,
                    )
            slots = tuple(tuple(free.take(len(blocks))) for free, blocks in zip(self._free, ranges, strict=True))
            for pool, taken in zip(self._wire, slots, strict=True):
                # Before they are overwritten: a reader who still trusts them can tell.
                pool.generations[list(taken)] += 1
        return WireSlots(slots, tuple(blocks.start for blocks in ranges))

    def covering(self, tables: Sequence[BlockTable], tokens: TokenRange) -> tuple[BlockTable, ...]:
        """`tables` from the blocks on in which `tokens` begin."""
        cut = []
        for pool, table in zip(self._stored, tables, strict=True):
            skipped = max(0, tokens.start // pool.layout.tokens_per_block - table.first_block)
            ids, generations = table.block_ids[skipped:], table.generations[skipped:]
            cut.append(BlockTable(ids, generations, table.first_block + skipped))
        return tuple(cut)

    def give(self, taken: WireSlots) -> None:
        with self._lock:
            for free, slots in zip(self._free, taken.slots, strict=True):
                for slot in slots:
                    free.put(slot)

    def tables(self, taken: WireSlots) -> tuple[BlockTable, ...]:
        return tuple(
            BlockTable(slots, pool.generations_of(slots), first)
            for pool, slots, first in zip(self._wire, taken.slots, taken.first_blocks, strict=True)
        )

    def fill(self, taken: WireSlots, tables: Sequence[BlockTable]) -> None:
        """Puts the blocks of `tables` into their slots."""
        for group, (slots, first) in enumerate(zip(taken.slots, taken.first_blocks, strict=True)):
            start = first - tables[group].first_block
            blocks = tables[group].block_ids[start : start + len(slots)]
            encode(self._stored[group], blocks, self._wire[group], slots)

    def empty(self, taken: WireSlots, tables: Sequence[BlockTable], tokens: TokenRange) -> None:
        """Writes what was loaded for `tokens` from its slots to the blocks of `tables`, and no other position."""
        for group, (slots, first) in enumerate(zip(taken.slots, taken.first_blocks, strict=True)):
            pool, table = self._stored[group], tables[group]
            rows = decode(self._wire[group], slots).to(pool.view.dtype)
            size, begin = pool.layout.tokens_per_block, lacks_from(pool.layout, table, tokens)
            axis = 3 if pool.layout.axis_order is AxisOrder.HEAD_TOKEN else 2  # of the tokens, in one block
            for index, block in enumerate(range(first, first + len(slots))):
                start, stop = max(begin, block * size), min(tokens.stop, (block + 1) * size)
                target = pool.view[table.block_ids[block - table.first_block]]
                within = (start - block * size, stop - start)
                target.narrow(axis, *within).copy_(rows[index].narrow(axis, *within))


def _blocks(layout: KVLayout, table: BlockTable, tokens: TokenRange) -> range:
    """The block indices of `table` that a transfer of `tokens` touches."""
    first = max(table.first_block, lacks_from(layout, table, tokens) // layout.tokens_per_block)
    return range(first, max(first, layout.blocks_for(tokens.stop))) if len(tokens) else range(first, first)
