"""V2's prefix index: a tree of published blocks whose roots are the scopes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from kvferry.core import block_digest
from kvferry.kvcache.core_v2 import Evictions, Links
from kvferry.kvcache.slots import LayerGroup

# A scope's root has a child for every first block there is: looking at all of them would cost more than it finds.
CHILDREN_LOOKED_AT = 32


class Node:
    """One published block of every layer group, under the digest of the whole prefix that ends with it.

    slots: per group, None where that group holds it no more. locks: caches whose newest committed block this is.
    A node has a slot in *every* group that keeps all blocks; only windows come and go by themselves.
    """

    __slots__ = ("children", "digest", "locks", "parent", "priority", "slots", "tokens")

    def __init__(
        self, digest: bytes, parent: Node | None, slots: list[int | None], priority: int, tokens: array[int]
    ) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.slots = slots
        self.priority = priority
        self.locks = 0

    @property
    def empty(self) -> bool:
        """Neither content nor anything that hangs on it."""
        return not self.children and not self.locks and all(slot is None for slot in self.slots)


class PrefixTree:
    """Finds, publishes and forgets blocks.

    Whoever uses a block uses all blocks before it, and releases the deepest first; therefore a block's slot is
    queued for eviction before its parent's, and evicting the head of a queue takes leaves first. The exception
    are blocks that only a pin keeps: when their parent goes they are unpublished with it.
    """

    def __init__(self, groups: Sequence[LayerGroup], tokens_per_block: int, journal: bool) -> None:
        """journal: whether to keep one for `drain`."""
        self._groups = tuple(groups)
        self._windows = tuple(group for group in groups if not group.rule.keeps_all)
        self._tokens_per_block = tokens_per_block
        self._roots: dict[bytes, Node] = {}
        self._keeps_journal = journal
        self._links: Links = []
        self._evictions: Evictions = []
        self.evicted = 0  # slots, ever

    def root(self, scope: bytes) -> Node:
        """The root of the scope with this digest, made where there is none; dropped again with its last block."""
        node = self._roots.get(scope)
        if node is None:
            node = Node(scope, None, [None] * len(self._groups), 0, array("I"))
            self._roots[scope] = node
        return node

    def find(self, scope: bytes, tokens: array[int]) -> list[Node]:
        """The longest published prefix of `tokens` that every group can serve, first block first."""
        path = self._published(scope, tokens)
        return path[: self._usable(path)]

    def find_to_load(self, scope: bytes, tokens: array[int], loaded: int) -> tuple[list[Node], bool]:
        """A prefix of `tokens` for a cache that will be loaded up to position `loaded`, and whether what windows and
        states lack of it must be loaded too: then it goes as far as the groups that keep all blocks can serve it.

        Only where every window must be loaded whole in either case, and something is left to load besides."""
        path = self._published(scope, tokens)
        usable = self._usable(path)
        far = path[: (loaded - 1) // self._tokens_per_block]
        starts = [group.rule.first_live_block(loaded) for group in self._windows if group.rule.is_window]
        late = len(far) > usable and all(usable <= start for start in starts)
        return (far if late else path[:usable]), late

    def _published(self, scope: bytes, tokens: array[int]) -> list[Node]:
        """The longest prefix of `tokens` that is published at all, which is what groups that keep all blocks have."""
        node = self._roots.get(scope)
        path: list[Node] = []
        size = self._tokens_per_block
        for start in range(0, len(tokens) - size + 1, size):
            node = node and node.children.get(block_digest(node.digest, tokens[start : start + size]))
            if node is None:
                break
            path.append(node)
        return path

    def _usable(self, path: Sequence[Node]) -> int:
        """How many blocks of `path` all groups can serve: a window must have the last few without a gap."""
        if not self._windows:
            return len(path)
        usable = 0
        unbroken = [0] * len(self._windows)
        for length, node in enumerate(path, start=1):
            served = True
            for which, group in enumerate(self._windows):
                unbroken[which] = 0 if node.slots[group.index] is None else unbroken[which] + 1
                needed = length - group.rule.first_live_block(length * self._tokens_per_block)
                served = served and unbroken[which] >= needed
            if served:
                usable = length
        return usable

    def publish(self, parent: Node, tokens: array[int], slots: list[int | None], priority: int) -> Node:
        """The child of `parent` that holds `tokens`, made of `slots` as far as it lacks any. The caller holds `slots`
        (None where a window dropped its block) and swaps the ones that differ from the node's."""
        digest = block_digest(parent.digest, tokens)
        node = parent.children.get(digest)
        if node is None:
            node = Node(digest, parent, [None] * len(slots), priority, tokens)
            parent.children[digest] = node
            if self._keeps_journal:
                self._links.append((digest, parent.digest))
        node.priority = max(node.priority, priority)
        for group, slot in zip(self._groups, slots, strict=True):
            if slot is not None and node.slots[group.index] is None:
                self.attach(node, group, slot)
        return node

    def closest_child(self, node: Node, tokens: array[int]) -> tuple[Node | None, int]:
        """The child of `node` that begins with most of `tokens`, and how many those are, among its newest children;
        of equals the newest. Only one that has a slot in every group, and None where none shares a token."""
        closest, most = None, 0
        for child in islice(reversed(node.children.values()), CHILDREN_LOOKED_AT):
            if None not in child.slots:
                pairs = zip(tokens, child.tokens, strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if shared > most:
                    closest, most = child, shared
        return closest, most

    def attach(self, node: Node, group: LayerGroup, slot: int) -> None:
        """Adds a slot, held by the caller, to a block that is there already."""
        group.store.publish(slot, node)
        node.slots[group.index] = slot

    def lock(self, node: Node) -> None:
        node.locks += 1

    def unlock(self, node: Node) -> None:
        node.locks -= 1
        self._prune(node)

    def evict(self, group: LayerGroup) -> None:
        """Frees the slot of `group` that is next in turn; a block no prefix can be served without goes whole."""
        self.evict_slot(group, group.store.cached.oldest())

    def evict_slot(self, group: LayerGroup, slot: int) -> None:
        """Frees one cached slot of `group`, whatever its turn."""
        node = group.store.publication(slot)
        assert isinstance(node, Node)
        if group.rule.keeps_all:
            self._forget_subtree(node)
        else:
            self._evict_slot(node, group)
        self._prune(node)

    def drain(self) -> tuple[Links, Evictions]:
        """What happened since the last call."""
        links, evictions, self._links, self._evictions = self._links, self._evictions, [], []
        return links, evictions

    def clear(self) -> None:
        """Forgets every block that no cache uses, and what only pins keep."""
        for node in reversed(list(self._nodes())):  # parents come first in the walk, so children go first here
            used = any(
                slot is not None and group.store.used_by_cache(slot)
                for group, slot in zip(self._groups, node.slots, strict=True)
            )
            for group in self._groups:
                slot = node.slots[group.index]
                drop_window = not group.rule.keeps_all and slot is not None and not group.store.used_by_cache(slot)
                if slot is not None and (drop_window or not used):
                    self._forget_slot(node, group)
            # Only this node: its ancestors come later in the walk.
            if node.empty:
                self._unlink(node)

    def _forget_subtree(self, top: Node) -> None:
        pending = [top]
        while pending:
            node = pending.pop()
            assert not node.locks, "a block before a live cache's newest one was evicted"
            pending.extend(node.children.values())
            node.children.clear()
            for group in self._groups:
                if node.slots[group.index] is not None:
                    self._evict_slot(node, group)
            if node is not top:  # which the caller prunes
                self._note_unlinked(node)

    def _evict_slot(self, node: Node, group: LayerGroup) -> None:
        slot = node.slots[group.index]
        assert slot is not None
        self.evicted += 1
        if self._keeps_journal:
            self._evictions.append((node.digest, group.index, slot))
        self._forget_slot(node, group)

    def _forget_slot(self, node: Node, group: LayerGroup) -> None:
        slot = node.slots[group.index]
        assert slot is not None
        node.slots[group.index] = None
        group.store.unpublish(slot)

    def _prune(self, node: Node) -> None:
        """Unlinks `node` and then its ancestors, as long as they are empty."""
        while node.empty:
            parent = node.parent
            self._unlink(node)
            if parent is None:
                return
            node = parent

    def _unlink(self, node: Node) -> None:
        if node.parent is None:
            self._roots.pop(node.digest, None)
        else:
            node.parent.children.pop(node.digest, None)
            self._note_unlinked(node)

    def _note_unlinked(self, node: Node) -> None:
        if self._keeps_journal:
            self._links.append((node.digest, None))

    def _nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check_integrity(self) -> None:
        published = [0] * len(self._groups)
        for node in self._nodes():
            assert not node.empty, "an empty node was left behind"
            for digest, child in node.children.items():
                assert child.digest == digest
                assert child.parent is node
                assert child.priority <= node.priority or node.parent is None, "a leaf outlives its parent"
            for group in self._groups:
                slot = node.slots[group.index]
                if slot is not None:
                    published[group.index] += 1
                    assert group.store.publication(slot) is node, "slot and node disagree"
                else:
                    assert not group.rule.keeps_all or node.parent is None, "a block lost one of its slots"
        for group in self._groups:
            assert published[group.index] == group.store.num_published, "a published slot is in no node"
