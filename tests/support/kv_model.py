"""What a KV cache manager under test ought to hold: the bookkeeping behind `kv_machine`, which only knows contents."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from manual_copier import ManualCopier
from memory_connector import MemoryConnector

from kvferry.core import BlockTable, GroupKind, KVLayout
from kvferry.kvcache import BlockHold, CacheStateError, KVCache, OutOfBlocksError, create_manager
from kvferry.kvcache.pool import slot_counts

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
SIZE = 4  # tokens per block
BLOCKS = 12
LENGTH = 40
SEQUENCES = (
    [1] * LENGTH,
    [1] * 8 + [2] * (LENGTH - 8),
    [1] * 14 + [3] * (LENGTH - 14),
    [4, 5, 6, 7] * (LENGTH // 4),
)
SCOPES = ("", "salt")
WHICH = st.integers(0, 7)  # picks one of several, whatever their number; far cheaper to draw than st.data()

FULL = KVLayout(GroupKind.FULL, (0, 3), 1, 1, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (1,), 1, 1, tokens_per_block=SIZE, window=6)
CHUNKED = KVLayout(GroupKind.CHUNKED, (2,), 1, 1, tokens_per_block=SIZE, window=10)
MLA = KVLayout(GroupKind.MLA, (4,), 1, 1, tokens_per_block=SIZE, planes=1)
CONV = KVLayout(GroupKind.CONV, (5,), 1, 1, tokens_per_block=1, planes=1)
SSM = KVLayout(GroupKind.SSM, (5,), 1, 1, tokens_per_block=1, planes=1)


@functools.cache
def expected_values(scope: str, tokens: bytes) -> Array:
    """What each of `tokens` leaves in the cache, a function of all before it; exact in float32."""
    prefixes = (tokens[:stop] for stop in range(1, len(tokens) + 1))
    return np.array([zlib.crc32(scope.encode() + prefix) % (1 << 20) + 1 for prefix in prefixes], dtype=np.float32)


def first_needed_token(layout: KVLayout, history: int) -> int:
    """The earliest position any token from `history` on attends to, counted the slow way."""
    if layout.kind is GroupKind.WINDOW:
        return next(p for p in range(history + 1) if history - p < (layout.window or 0))
    if layout.kind is GroupKind.CHUNKED:
        return next(p for p in range(history + 1) if p // (layout.window or 1) == history // (layout.window or 1))
    return 0


@dataclass(eq=False)
class Live:
    cache: KVCache
    scope: str
    tokens: list[int]
    just_committed: bool = True
    forked: int = 0  # blocks that it may share with forks, and only reads
    resumed: bool = False
    near: int = 0  # positions below it have a page in every group
    loaded: int = 0  # history will be at least this next

    @property
    def loading(self) -> bool:
        return self.loaded > self.cache.history

    @property
    def late(self) -> bool:
        """Whether windows and states hold nothing of what the others reuse."""
        return self.cache.lacks_windows

    @property
    def values(self) -> Array:
        """float32 [LENGTH]: what each of its tokens leaves in the cache."""
        return expected_values(self.scope, bytes(self.tokens))

    @property
    def state(self) -> float:
        """What its history leaves in a state."""
        return float(self.values[self.cache.history - 1]) if self.cache.history else 0.0


@dataclass(eq=False)
class Held:
    hold: BlockHold
    tables: tuple[BlockTable, ...]
    history: int = 0
    contents: list[Array] = field(default_factory=list)


class ManagerModel(RuleBasedStateMachine):
    version: ClassVar[str]
    core: ClassVar[str] = "cpp"
    layouts: ClassVar[tuple[KVLayout, ...]]
    drops_stale: ClassVar[bool] = False
    debug: ClassVar[bool] = False
    host_blocks: ClassVar[int] = 0
    external: ClassVar[bool] = False
    copies_later: ClassVar[bool] = False
    """Whether copies between the pools and the host tier are steps of their own; only while there are none under way
    does the model know how many slots are free."""
    typical: ClassVar[int | None] = None
    """Set: the groups share one buffer, and the model does not know which of them has how much of it."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_nbytes = [layout.slot_nbytes for layout in self.layouts]
        self.states = [group for group, layout in enumerate(self.layouts) if layout.kind.is_state]
        self.connector = MemoryConnector()
        self.has_below = bool(self.host_blocks or self.external)
        self.copier = ManualCopier()
        self.manager = create_manager(
            self.version,
            self.layouts,
            self._nbytes(BLOCKS),
            debug=self.debug,
            core=self.core,
            host_bytes=self._nbytes(self.host_blocks) if self.host_blocks else 0,
            connector=self.connector if self.external else None,
            typical_tokens=self.typical,
            step_tokens=SIZE,
            copier=self.copier if self.copies_later else None,
        )
        self.views = [pool.view.numpy() for pool in self.manager.pools]
        self.counters = [pool.generations.numpy() for pool in self.manager.pools]
        self._quota = slot_counts(self.layouts, BLOCKS)
        self.start = self.manager.counts()
        self.live: list[Live] = []
        self.suspended: list[Live] = []
        self.closed: list[KVCache] = []
        self.pins: list[Held] = []
        self.quarantines: list[Held] = []
        self.published: set[tuple[str, tuple[int, ...]]] = set()
        self.snapshots: set[tuple[str, tuple[int, ...]]] = set()
        self.generations = [counters.copy() for counters in self.counters]
        self.claimed: list[set[int]] = [set() for _ in self.layouts]

    # -- what the steps do ------------------------------------------------------------------------------

    def _claim_copied(self, cache: KVCache) -> None:
        """A block that opening copied has been claimed."""
        if cache.history > cache.committed:
            for group in range(len(self.layouts)):
                self.claimed[group].add(cache.block_table(group)[-1])

    def _reserve(self, live: Live, capacity: int, ahead: int | None = None, loaded: int = 0) -> bool:
        """Reserves where the model says there is room, checks the refusal where there is none."""
        start = max(live.cache.history, loaded)
        near = max(live.near, capacity if ahead is None else min(capacity, start + ahead))
        tables = self._tables(live)
        copied = capacity > live.cache.capacity and self._shares_its_tail(live)
        needs = []
        for (table, first), layout in zip(tables, self.layouts, strict=True):
            begin, stop = first + len(table), max(capacity, live.cache.capacity)
            if self.drops_stale and layout.window:
                begin, stop = max(begin, first_needed_token(layout, loaded) // SIZE), near
            needs.append(max(0, -(-stop // SIZE) - begin) + copied)
        blocks = -(-max(capacity, live.cache.capacity) // SIZE)
        for group in self.states:
            needs[group] = 0 if self._owns_state(live) or not blocks else 1
        lacking = any(n > quota - len(held) for n, quota, held in zip(needs, self.quota, self._held(), strict=True))
        if lacking:
            before = self._seen()
            try:
                live.cache.reserve(capacity, ahead=ahead, loaded=loaded)
            except OutOfBlocksError:
                assert self._seen() == before
                return False
            assert self.typical is not None, "more was given than there is"
        elif not self._unless_copying(lambda: live.cache.reserve(capacity, ahead=ahead, loaded=loaded)):
            return False
        live.near, live.loaded = near, max(loaded, live.loaded)
        live.just_committed = live.just_committed and not loaded
        if loaded:  # windows may have dropped blocks and got them back
            self._forget_generations()
        assert live.cache.capacity >= capacity
        for group, (table, _) in enumerate(tables):
            now, kept = list(live.cache.block_table(group)), len(table) - copied
            if group in self.states or loaded:
                continue
            assert now[:kept] == table[:kept]
            self.claimed[group] |= set(now[kept:])
        if live.cache.capacity > live.cache.history:
            live.forked = min(live.forked, live.cache.history // SIZE)
        return True

    def _shares_its_tail(self, live: Live) -> bool:
        """Whether another cache has the same partly filled last block."""
        tails = [self._tables(other)[0][0][-1:] for other in self.live if other.forked > other.cache.history // SIZE]
        return live.forked > live.cache.history // SIZE and tails.count(self._tables(live)[0][0][-1:]) > 1

    def _advance(self, live: Live, stop: int) -> None:
        start = live.cache.history
        for group, view in enumerate(self.views):
            positions, values = np.arange(start, stop), live.values[start:stop, None, None]
            if group in self.states:
                if stop > start:
                    view[list(live.cache.block_table(group))] = live.values[stop - 1]
                continue
            slots = np.array(live.cache.block_table(group), dtype=np.int64)
            first = live.cache.first_block(group)
            if start < first * SIZE:  # what no later token looks at was not sent
                positions, values = positions[first * SIZE - start :], values[first * SIZE - start :]
            elif live.late and self.layouts[group].window:
                positions, values = np.arange(first * SIZE, stop), live.values[first * SIZE : stop, None, None]
            view[slots[positions // SIZE - first], :, :, 0, positions % SIZE, 0] = values
        live.cache.advance(stop)
        live.just_committed = live.just_committed and stop == start

    def _commit(self, live: Live) -> None:
        history = live.cache.history
        live.cache.commit(live.tokens[:history])
        assert live.cache.committed == history // SIZE * SIZE
        live.just_committed = True
        for blocks in range(1, history // SIZE + 1):
            self.published.add((live.scope, tuple(live.tokens[: blocks * SIZE])))

    def _unless_copying(self, call: Callable[[], object]) -> bool:
        """Whether `call` succeeds; it must, unless copies under way have pages."""
        before, copying = self._seen(), self.pages_away
        try:
            call()
        except OutOfBlocksError:
            assert copying
            assert self._seen() == before
            return False
        return True

    # -- the model --------------------------------------------------------------------------------------

    @property
    def copying(self) -> bool:
        """Whether copies are under way, or have ended without that being noted yet."""
        return self.copies_later and bool(self.manager._books.flights)  # type: ignore[attr-defined]

    @property
    def pages_away(self) -> bool:
        """Whether copies, or suspended caches that will soon be resumed, have pages."""
        return self.copying or any(live.cache.resuming for live in self.suspended)

    def _take(self, which: int, among: list[Live]) -> Live:
        live = pick(among, which)
        among.remove(live)
        return live

    def _tables(self, live: Live) -> list[tuple[list[int], int]]:
        return [
            (list(live.cache.block_table(group)), live.cache.first_block(group)) for group in range(len(self.layouts))
        ]

    def _slots_of(self, holds: list[Held]) -> list[set[int]]:
        return [{slot for held in holds for slot in held.tables[group].block_ids} for group in range(len(self.layouts))]

    def _held(self) -> list[set[int]]:
        """Per group, the slots somebody holds."""
        held = self._slots_of(self.pins + self.quarantines)
        for live in self.live:
            for group, slots in enumerate(held):
                slots |= set(live.cache.block_table(group))
        return held

    def _committed_by_live(self, scope: str, tokens: list[int], *, by_forks: bool = False) -> int:
        """by_forks: what a live cache shares with a fork counts too, which the other one may have committed."""
        shared = [0]
        for live in self.live:
            if live.scope == scope:
                common = next((i for i in range(LENGTH) if live.tokens[i] != tokens[i]), LENGTH)
                committed = max(live.cache.committed, live.forked * SIZE if by_forks else 0)
                shared.append(min(common // SIZE * SIZE, committed))
        return max(shared)

    def _written(self, group: int, table: BlockTable, history: int) -> Array:
        """The bytes of the positions below `history`: a partly filled last block may be written on behind them."""
        blocks = np.moveaxis(self.views[group][list(table.block_ids)], 4, 1)
        tokens = blocks.reshape(-1, *blocks.shape[2:])
        return tokens[: max(0, history - table.first_block * SIZE)]

    @property
    def quota(self) -> list[int]:
        """Slots each group may have now."""
        if self.typical is None:
            return self._quota
        return [counts.total for counts in self.manager.group_counts()]

    def _owns_state(self, live: Live) -> bool:
        """Whether its states are its own to write; a cache that begins with a snapshot has none before it grows."""
        return live.resumed or live.cache.capacity > live.cache.reused

    def _holds_state(self, live: Live) -> bool:
        return live.cache.capacity > 0 and (self._owns_state(live) or not live.late)

    def _nbytes(self, blocks: int) -> int:
        return nbytes_of(self.layouts, blocks)

    def _seen(self) -> object:
        lengths = self._seen_lengths()
        matches = [self.manager.match(scope, tokens) for scope in SCOPES for tokens in SEQUENCES]
        return lengths, matches, self.manager.counts(), [counters.tolist() for counters in self.counters]

    def _seen_lengths(self) -> object:
        return [(c.cache.committed, c.cache.history, c.cache.capacity, self._tables(c)) for c in self.live]

    def _refused(self, call: Callable[[], object]) -> None:
        before = self._seen()
        with pytest.raises(CacheStateError):
            call()
        assert self._seen() == before

    def _forget_generations(self) -> None:
        """What is withheld has been claimed."""
        for ours, counters in zip(self.generations, self.counters, strict=True):
            np.maximum(ours, counters, out=ours)


@functools.cache
def nbytes_of(layouts: tuple[KVLayout, ...], blocks: int) -> int:
    counts = slot_counts(layouts, blocks)
    return sum(count * layout.slot_nbytes for count, layout in zip(counts, layouts, strict=True))


def pick(among: list[T], which: int) -> T:
    return among[which % len(among)]
