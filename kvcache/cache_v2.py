"""One request's cache under manager V2: a block table per layer group."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvferry.core import BlockTable, block_digest
from kvferry.kvcache.base import BlockHold
from kvferry.kvcache.groups import LayerGroup
from kvferry.kvcache.holds import HeldSlots, HoldKind, SlotHold
from kvferry.kvcache.ledger_v2 import LedgerV2
from kvferry.kvcache.lengths import TrackedCache
from kvferry.kvcache.prefix_tree import Node


class CacheV2(TrackedCache):
    """Blocks below index `_published` are in the tree under `_tip` and its ancestors, and are only read; those
    behind belong to this cache alone. A window's table starts at `_first`, which rises as blocks go stale."""

    def __init__(self, ledger: LedgerV2, root: Node, path: Sequence[Node], priority: int) -> None:
        """path: the published prefix to start with. Its blocks are held from here on."""
        super().__init__(ledger.tokens_per_block, len(path) * ledger.tokens_per_block)
        self._ledger = ledger
        self._priority = priority
        self._published = len(path)
        self._tip = path[-1] if path else root
        self._first = [group.first_live_block(self._history) for group in ledger.groups]
        self._tables = [
            _hold_path(group, path[first:]) for group, first in zip(ledger.groups, self._first, strict=True)
        ]
        for node in path:
            node.priority = max(node.priority, priority)
        self._windows = tuple(group for group in ledger.groups if not group.keeps_all)
        ledger.tree.lock(self._tip)
        ledger.caches.add(self)

    def block_table(self, group: int) -> Sequence[int]:
        return self._tables[group]

    def first_block(self, group: int) -> int:
        return self._first[group]

    def pin(self) -> BlockHold:
        self._check_open()
        blocks = -(-self._history // self._tokens_per_block)
        parts = [table[: blocks - first] for table, first in zip(self._tables, self._first, strict=True)]
        return self._keep(HoldKind.PINNED, parts, self._first)

    def quarantine(self) -> BlockHold:
        self._check_open()
        self._closed = True
        starts = [max(first, self._published) for first in self._first]
        parts = []
        for which, start in enumerate(starts):
            table, first = self._tables[which], self._first[which]
            parts.append(table[start - first :])
            self._tables[which] = table[: start - first]
        hold = self._keep(HoldKind.QUARANTINED, parts, starts)
        self._give_back()
        return hold

    def _keep(self, kind: HoldKind, parts: Sequence[list[int]], first_blocks: Sequence[int]) -> SlotHold:
        pages, groups = self._ledger.pages, self._ledger.groups
        tables = tuple(
            BlockTable(tuple(slots), pages.generations(group.index, slots), first)
            for group, slots, first in zip(groups, parts, first_blocks, strict=True)
        )
        held = tuple(HeldSlots(group.store, slots) for group, slots in zip(groups, parts, strict=True))
        return SlotHold(kind, tables, held, self._ledger.holds)

    def _grow(self, capacity: int) -> None:
        blocks = -(-capacity // self._tokens_per_block)
        needs = [max(0, blocks - first - len(table)) for table, first in zip(self._tables, self._first, strict=True)]
        if any(needs):
            after = [table[-1] if table else None for table in self._tables]
            for table, slots in zip(self._tables, self._ledger.allocate(needs, after), strict=True):
                table.extend(slots)

    def _advanced(self, before: int) -> None:
        """A window's blocks that filled and went stale in this very step stay until they could be committed:
        another request may fork off in the middle of this prompt and needs the window as it was there."""
        for group in self._windows:
            live = group.first_live_block(self._history)
            if self._ledger.reuse:
                live = max(group.first_live_block(before), min(live, self._published))
            self._drop_before(group, live)

    def _publish(self, token_ids: Sequence[int], blocks: int) -> int:
        if not self._ledger.reuse:
            return self._committed
        size, tree, tip = self._tokens_per_block, self._ledger.tree, self._tip
        done = self._published
        packed = array("I", token_ids[done * size : blocks * size])
        for index in range(done, blocks):
            at = (index - done) * size
            mine = [
                table[index - first] if index >= first else None
                for table, first in zip(self._tables, self._first, strict=True)
            ]
            tip = tree.publish(tip, block_digest(tip.digest, packed[at : at + size]), mine, self._priority)
            self._swap(index, mine, tip)
        tree.lock(tip)
        tree.unlock(self._tip)
        self._tip, self._published = tip, blocks
        for group in self._windows:
            self._drop_before(group, group.first_live_block(self._history))
        return blocks * size

    def _swap(self, index: int, mine: Sequence[int | None], node: Node) -> None:
        """Another request published this block first: use its copy, give ours back (a pin may still keep it)."""
        for group, slot, theirs in zip(self._ledger.groups, mine, node.slots, strict=True):
            if slot is not None and theirs is not None and slot != theirs:
                group.store.hold(theirs)
                self._tables[group.index][index - self._first[group.index]] = theirs
                group.store.drop(slot)

    def _drop_before(self, group: LayerGroup, live: int) -> None:
        """Lets go of the blocks of `group` below index `live`."""
        stale = live - self._first[group.index]
        if stale > 0:
            table = self._tables[group.index]
            for slot in table[:stale][::-1]:
                group.store.drop(slot)
            del table[:stale]
            self._first[group.index] = live

    def _give_back(self) -> None:
        for group, table in zip(self._ledger.groups, self._tables, strict=True):
            for slot in reversed(table):
                group.store.drop(slot)
            table.clear()
        self._ledger.tree.unlock(self._tip)
        self._ledger.caches.remove(self)

    def check_integrity(self) -> None:
        assert 0 <= self._committed <= self._history <= self._capacity
        blocks = -(-self._capacity // self._tokens_per_block)
        path: list[Node] = []
        node: Node | None = self._tip
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        assert len(path) == self._published
        for group, table, first in zip(self._ledger.groups, self._tables, self._first, strict=True):
            assert first + len(table) == max(blocks, first), "a group holds too many or too few blocks"
            assert first <= group.first_live_block(self._history), "a block that is still needed was dropped"
            assert first == 0 or not group.keeps_all
            for node, slot in zip(path[first:], table, strict=False):
                assert node.slots[group.index] == slot, "a committed block is not the published one"
            for slot in table[max(0, len(path) - first) :]:
                assert group.store.publication(slot) is None, "an uncommitted block is published"


def _hold_path(group: LayerGroup, path: Sequence[Node]) -> list[int]:
    table = []
    for node in path:
        slot = node.slots[group.index]
        assert slot is not None, "the prefix found has a gap"
        group.store.hold(slot)
        table.append(slot)
    return table
