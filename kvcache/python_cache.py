"""One request's block tables in the Python core."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.kvcache.holds import HeldSlots, HoldKind, SlotHold
from kvferry.kvcache.prefix_tree import Node
from kvferry.kvcache.slots import LayerGroup

if TYPE_CHECKING:
    from kvferry.kvcache.python_core import PythonLedger


class PythonCache:
    """A `CoreCache`. Blocks below index `_published` are in the tree under `_tip` and its ancestors, and are only
    read; those behind belong to this cache alone. A window's table starts at `_first`, which rises as blocks go stale.
    While the cache is `late`, windows and states hold nothing published: all of theirs is this cache's own.
    """

    def __init__(
        self, ledger: PythonLedger, root: Node, path: Sequence[Node], priority: int, late_until: int | None
    ) -> None:
        """path: the published prefix to start with. Its blocks are held from here on. late_until: the position up to
        which windows and states will be loaded; None where they hold their part of the path."""
        self._ledger = ledger
        self._priority = priority
        self._published = len(path)
        self._tip = path[-1] if path else root
        self._late = late_until is not None
        history = len(path) * ledger.tokens_per_block if late_until is None else late_until
        self._first = [group.rule.first_live_block(history) for group in ledger.groups]
        self._tables = [
            _hold_path(group, () if self._late and not group.rule.keeps_all else path[first:])
            for group, first in zip(ledger.groups, self._first, strict=True)
        ]
        for group in ledger.groups:
            if group.rule.is_state:
                self._first[group.index] = 0  # its slot is no block's
        for node in path:
            node.priority = max(node.priority, priority)
        self._windows = tuple(group for group in ledger.groups if group.rule.is_window)
        self._states = tuple(group for group in ledger.groups if group.rule.is_state)
        ledger.tree.lock(self._tip)
        ledger.caches.add(self)

    @property
    def published(self) -> int:
        return self._published

    @property
    def late(self) -> bool:
        return self._late

    def first_block(self, group: int) -> int:
        return self._first[group]

    def table(self, group: int) -> Sequence[int]:
        return self._tables[group]

    def shortage(self, blocks: int, near: int, loaded: int) -> tuple[int, int, int] | None:
        return self._ledger.shortage(self.needs(blocks, near, loaded))

    def grow(self, blocks: int, near: int) -> Sequence[Sequence[int]]:
        after = [table[-1] if table else None for table in self._tables]
        taken = self._ledger.allocate(self.needs(blocks, near, 0), after)
        for group in self._states:
            table = self._tables[group.index]
            if taken[group.index] and table:
                group.store.drop(table.pop())  # the snapshot: its bytes stay until somebody else claims it
        for table, slots in zip(self._tables, taken, strict=True):
            table.extend(slots)
        return taken

    def needs(self, blocks: int, near: int, loaded: int) -> list[int]:
        needs = []
        for group, table, first in zip(self._ledger.groups, self._tables, self._first, strict=True):
            end, stop = first + len(table), blocks
            if group.rule.is_window:
                end, stop = max(end, group.rule.first_live_block(loaded)), near
            needs.append(max(0, stop - end))
        for group in self._states:
            has_live = self._tables[group.index] and not self._has_snapshot_only(group)
            needs[group.index] = 0 if has_live or not blocks else 1
        return needs

    def _has_snapshot_only(self, group: LayerGroup) -> bool:
        table = self._tables[group.index]
        return bool(table) and group.store.publication(table[0]) is not None

    def snapshot(self) -> Sequence[tuple[int, int, int]]:
        needs = [0] * len(self._tables)
        for group in self._states:
            has_live = bool(self._tables[group.index]) and not self._has_snapshot_only(group)
            needs[group.index] = int(has_live and self._tip.slots[group.index] is None)
        if self._ledger.shortage(needs) is not None:
            return []
        taken = self._ledger.allocate(needs, [None] * len(needs))
        copies = []
        for group in self._states:
            for slot in taken[group.index]:
                self._ledger.tree.attach(self._tip, group, slot)
                group.store.drop(slot)
                copies.append((group.index, self._tables[group.index][0], slot))
        return copies

    def advance(self, before: int, history: int) -> None:
        """A window's blocks that filled and went stale in this very step stay until they could be committed:
        another request may fork off in the middle of this prompt and needs the window as it was there."""
        for group in self._windows:
            live = group.rule.first_live_block(history)
            if self._ledger.reuse:
                live = max(group.rule.first_live_block(before), min(live, self._published))
            self._drop_before(group, live)

    def publish(self, tokens: array[int], blocks: int, history: int) -> None:
        size, tree, tip = self._ledger.tokens_per_block, self._ledger.tree, self._tip
        if self._late:
            self._fill_in()
        assert len(tokens) == (blocks - self._published) * size, "the tokens do not fit the blocks"
        for index in range(self._published, blocks):
            at = (index - self._published) * size
            mine = [
                table[index - first] if index >= first and not group.rule.is_state else None
                for group, table, first in zip(self._ledger.groups, self._tables, self._first, strict=True)
            ]
            tip = tree.publish(tip, tokens[at : at + size], mine, self._priority)
            self._swap(index, mine, tip)
        tree.lock(tip)
        tree.unlock(self._tip)
        self._tip, self._published = tip, blocks
        for group in self._windows:
            self._drop_before(group, group.rule.first_live_block(history))

    def _fill_in(self) -> None:
        """What was loaded of windows becomes part of the published blocks the cache started with."""
        self._late = False
        node, index = self._tip, self._published - 1
        while node.parent is not None and any(self._first[group.index] <= index for group in self._windows):
            mine: list[int | None] = [None] * len(self._tables)
            for group in self._windows:
                at = index - self._first[group.index]
                if at >= 0:
                    slot = mine[group.index] = self._tables[group.index][at]
                    if node.slots[group.index] is None:
                        self._ledger.tree.attach(node, group, slot)
            self._swap(index, mine, node)
            node, index = node.parent, index - 1

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

    def begin_block(self, tokens: array[int], least: int) -> tuple[int, Sequence[tuple[int, int, int]]]:
        source, shared = self._ledger.tree.closest_child(self._tip, tokens)
        # A state cannot be cut in the middle of a block.
        if source is None or shared < least or self._states:
            return 0, []
        sources = [
            (group, slot) for group, slot in zip(self._ledger.groups, source.slots, strict=True) if slot is not None
        ]
        for group, slot in sources:
            group.store.hold(slot)
        copies: list[tuple[int, int, int]] = []
        blocks = self._published + 1
        if self.shortage(blocks, blocks, 0) is None:
            source.priority = max(source.priority, self._priority)
            taken = self.grow(blocks, blocks)
            copies = [(group.index, slot, taken[group.index][0]) for group, slot in sources]
        for group, slot in sources:
            group.store.drop(slot)
        return shared if copies else 0, copies

    def pin(self, blocks: int) -> SlotHold:
        parts = [table[: max(0, blocks - first)] for table, first in zip(self._tables, self._first, strict=True)]
        # A state group's one slot stands for all blocks there are, and first is 0.
        return self._keep(HoldKind.PINNED, parts, self._first)

    def quarantine(self) -> SlotHold:
        starts = [
            first if self._late and group.rule.is_window else max(first, self._published)
            for group, first in zip(self._ledger.groups, self._first, strict=True)
        ]
        for group in self._states:
            starts[group.index] = 1 if self._has_snapshot_only(group) else 0
        parts = []
        for table, first, start in zip(self._tables, self._first, starts, strict=True):
            parts.append(table[start - first :])
            del table[start - first :]
        for group in self._states:
            starts[group.index] = 0
        hold = self._keep(HoldKind.QUARANTINED, parts, starts)
        self.close()
        return hold

    def _keep(self, kind: HoldKind, parts: Sequence[list[int]], first_blocks: Sequence[int]) -> SlotHold:
        groups = self._ledger.groups
        held = tuple(HeldSlots(group.store, slots) for group, slots in zip(groups, parts, strict=True))
        return SlotHold(kind, held, first_blocks, self._ledger.holds)

    def close(self) -> None:
        for group, table in zip(self._ledger.groups, self._tables, strict=True):
            for slot in reversed(table):
                group.store.drop(slot)
            table.clear()
        self._ledger.tree.unlock(self._tip)
        self._ledger.caches.remove(self)

    def check_integrity(self, history: int, blocks: int, near: int) -> None:
        path: list[Node] = []
        node: Node | None = self._tip
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        assert len(path) == self._published
        for group, table, first in zip(self._ledger.groups, self._tables, self._first, strict=True):
            if group.rule.is_state:
                assert len(table) <= 1, "a state group holds more than one slot"
                assert not self._has_snapshot_only(group) or self._tip.slots[group.index] == table[0]
                continue
            held = near if group.rule.is_window else blocks
            assert first + len(table) == max(held, first), "a group holds too many or too few blocks"
            assert first <= group.rule.first_live_block(history), "a block that is still needed was dropped"
            assert first == 0 or not group.rule.keeps_all
            published = [] if self._late and group.rule.is_window else path[first:]
            for node, slot in zip(published, table, strict=False):
                assert node.slots[group.index] == slot, "a committed block is not the published one"
            for slot in table[len(published) :]:
                assert group.store.publication(slot) is None, "an uncommitted block is published"


def _hold_path(group: LayerGroup, path: Sequence[Node]) -> list[int]:
    table = []
    for node in path:
        slot = node.slots[group.index]
        assert slot is not None, "the prefix found has a gap"
        group.store.hold(slot)
        table.append(slot)
    return table
