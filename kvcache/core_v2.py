"""The seam between manager V2 and its bookkeeping core, which exists twice: in C++ and, as the oracle, in Python.

A core knows slots, digests and priorities, never memory or request lengths. Both cores take identical decisions on
identical sequences of calls: the same digests, slots, evictions, down to the order of the free list. Misuse is our
bug and raises AssertionError.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.core import Registry
from kvferry.kvcache.groups import GroupRule


class CoreHold(Protocol):
    """Slots kept beyond their cache's life."""

    @property
    def slots(self) -> Sequence[Sequence[int]]:
        """Per layer group, in token order."""

    @property
    def first_blocks(self) -> Sequence[int]:
        """Per layer group, the block index of the first slot."""

    def release(self) -> None: ...


class CoreCache(Protocol):
    """One request's block tables. Sizes are in blocks; the first `published` ones are in the prefix index."""

    @property
    def published(self) -> int: ...

    @property
    def late(self) -> bool:
        """Whether windows and states hold nothing yet of what the published blocks stand for: what later tokens need
        of it is to be loaded. Until the next `publish`."""

    def first_block(self, group: int) -> int: ...

    def table(self, group: int) -> Sequence[int]:
        """A view that changes with the cache. In a state group one slot at most: the live one, or the snapshot to
        start from until `grow` gets a live one (the snapshot's bytes are whole until the next call)."""

    def needs(self, blocks: int, near: int, loaded: int) -> Sequence[int]:
        """Slots each group lacks to have `blocks` blocks. A window has them up to index `near` only, and from where the
        token at position `loaded` needs it."""

    def shortage(self, blocks: int, near: int, loaded: int) -> tuple[int, int, int] | None:
        """(group, needed, available) of the first group that has too few slots for that."""

    def grow(self, blocks: int, near: int) -> Sequence[Sequence[int]]:
        """Gets the slots that are missing, evicting what it must; the new ones of each group. Ask `shortage` first."""

    def advance(self, before: int, history: int) -> None:
        """History rose: lets go of what no later token needs and nobody can publish any more."""

    def publish(self, tokens: array[int], blocks: int, history: int) -> None:
        """Publishes the blocks below index `blocks`; `tokens` (u32) are those of the unpublished ones among them."""

    def snapshot(self) -> Sequence[tuple[int, int, int]]:
        """A snapshot of the state after the last published block, for every state group that has none there:
        (group, live slot, slot to copy it to). Nothing where there is no room."""

    def begin_block(self, tokens: array[int], least: int) -> tuple[int, Sequence[tuple[int, int, int]]]:
        """Gets one more block, to be filled with a copy of the published block that begins with most of `tokens`, at
        least `least` of them: how many those are, and (group, slot, slot to copy it to). (0, nothing) where there is
        no such block or no room. Sources are whole until the next call."""

    def pin(self, blocks: int) -> CoreHold:
        """Keeps the first `blocks` blocks for readers."""

    def quarantine(self) -> CoreHold:
        """Ends the cache and keeps its unpublished blocks from everybody."""

    def close(self) -> None: ...

    def check_integrity(self, history: int, blocks: int, near: int) -> None: ...


Links = list[tuple[bytes, bytes | None]]
"""(digest, parent digest) of a block that was linked to the prefix index, (digest, None) of one that was unlinked."""

Evictions = list[tuple[bytes, int, int]]
"""(digest, group, slot): eviction emptied the slot of that block; its bytes are whole until its next owner writes."""


class CoreLedger(Protocol):
    """The books of all pools. scope: the root digest of a request's prefixes; tokens: u32."""

    def open(self, scope: bytes, tokens: array[int], priority: int, loaded: int) -> CoreCache:
        """A cache that starts with the longest published prefix of `tokens`. loaded: the position up to which it will
        be loaded next, for which it may start further on, and `late` (0: it will not be loaded)."""

    def match(self, scope: bytes, tokens: array[int]) -> int:
        """Blocks of the longest prefix every group can serve."""

    def available(self, group: int) -> int: ...

    def idle(self, group: int) -> Sequence[int]:
        """Slots nobody holds: the free ones, ascending, then the cached ones in the order of their eviction."""

    def coldest(self, group: int, most: int) -> Sequence[tuple[bytes, int]]:
        """The first `most` cached slots in the order of their eviction, as (digest of the block, slot)."""

    def idle_slabs(self, group: int) -> int:
        """How many slabs of a group that shares its memory have no slot that anybody holds."""

    def first_idle_slabs(self, group: int, most: int) -> Sequence[tuple[bool, int]]:
        """Up to `most` of them as (whether something is cached there, slab): empty ones first, then those of lowest
        priority, idle for longest."""

    def withhold(self, group: int, slots: Sequence[int]) -> None:
        """Keeps idle slots from everybody until they are given back; what was cached in them is evicted."""

    def give_back(self, group: int, slots: Sequence[int]) -> None: ...

    def counts(self, group: int | None = None) -> tuple[int, int, int, int, int]:
        """total (without what is withheld), free, cached, pinned, quarantined; of all groups together, or of one."""

    @property
    def evicted(self) -> int:
        """Cached slots that made way for others, ever."""

    def clear(self) -> None: ...

    def drain(self) -> tuple[Links, Evictions]:
        """What happened since the last call, where a journal is kept."""

    def check_integrity(self) -> None: ...


CoreBuilder = Callable[[Sequence[GroupRule], Sequence[int], bool, bool, Sequence[int]], CoreLedger]
"""(rule and number of slots of each layer group, whether anything is published, whether to keep a journal, slots of
each group in a slab, 0 where it does not share its memory)."""

CORES: Registry[CoreBuilder] = Registry("KV cache core", "kv_cache.core")


def _cpp(
    rules: Sequence[GroupRule], num_slots: Sequence[int], reuse: bool, journal: bool, per_slab: Sequence[int]
) -> CoreLedger:
    from kvferry.kvcache.native import core

    groups = [(rule.keeps.value, rule.window, slots) for rule, slots in zip(rules, num_slots, strict=True)]
    return core.Ledger(groups, rules[0].tokens_per_block, reuse, journal, per_slab)


def _python(
    rules: Sequence[GroupRule], num_slots: Sequence[int], reuse: bool, journal: bool, per_slab: Sequence[int]
) -> CoreLedger:
    from kvferry.kvcache.python_core import PythonLedger

    return PythonLedger(rules, num_slots, reuse, journal, per_slab)


CORES.register("cpp", _cpp)
CORES.register("python", _python)
