"""A state machine that drives a KV cache manager at random and compares it with a model that only knows contents.

Every cache that is written gets values that are a function of scope and prefix alone, so a wrong block, a second
writer or an early reuse shows as a wrong value somewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from memory_connector import MemoryConnector

from kvferry.core import BlockTable, GroupKind, KVLayout
from kvferry.kvcache import BlockHold, CacheStateError, KVCache, OutOfBlocksError, create_manager

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

FULL = KVLayout(GroupKind.FULL, (0, 3), 1, 1, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (1,), 1, 1, tokens_per_block=SIZE, window=6)
CHUNKED = KVLayout(GroupKind.CHUNKED, (2,), 1, 1, tokens_per_block=SIZE, window=10)
MLA = KVLayout(GroupKind.MLA, (4,), 1, 1, tokens_per_block=SIZE, planes=1)


def expected_value(scope: str, prefix: list[int]) -> float:
    """What the token at the end of `prefix` leaves in the cache; exact in float32."""
    return float(zlib.crc32(scope.encode() + bytes(prefix)) % (1 << 20) + 1)


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


@dataclass(eq=False)
class Held:
    hold: BlockHold
    tables: tuple[BlockTable, ...]
    history: int = 0
    contents: list[torch.Tensor] = field(default_factory=list)


class ManagerMachine(RuleBasedStateMachine):
    version: ClassVar[str]
    core: ClassVar[str] = "cpp"
    layouts: ClassVar[tuple[KVLayout, ...]]
    drops_stale: ClassVar[bool] = False
    debug: ClassVar[bool] = False
    host_blocks: ClassVar[int] = 0
    external: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        row_nbytes = sum(layout.slot_nbytes for layout in self.layouts)
        host_bytes = self.host_blocks * row_nbytes
        self.connector = MemoryConnector()
        self.has_below = bool(self.host_blocks or self.external)
        self.manager = create_manager(
            self.version,
            self.layouts,
            BLOCKS * row_nbytes,
            debug=self.debug,
            core=self.core,
            host_bytes=host_bytes,
            connector=self.connector if self.external else None,
        )
        self.quota = BLOCKS
        self.start = self.manager.counts()
        self.live: list[Live] = []
        self.suspended: list[Live] = []
        self.closed: list[KVCache] = []
        self.pins: list[Held] = []
        self.quarantines: list[Held] = []
        self.published: set[tuple[str, tuple[int, ...]]] = set()
        self.generations = [pool.generations.clone() for pool in self.manager.pools]
        self.claimed: list[set[int]] = [set() for _ in self.layouts]

    # -- steps ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        tokens=st.sampled_from(SEQUENCES),
        scope=st.sampled_from(SCOPES),
        prompt=st.integers(1, LENGTH),
        sampling=st.integers(0, 1),
        priority=st.integers(0, 1),
        least=st.sampled_from([0, 0, 1, 3]),
        steps=st.integers(0, 3),
    )
    def open(
        self, tokens: list[int], scope: str, prompt: int, sampling: int, priority: int, least: int, steps: int
    ) -> None:
        """Opens a cache and takes the first `steps` of reserve, advance, commit for the whole prompt at once."""
        matched = self.manager.match(scope, tokens[:prompt])
        limit = prompt - sampling
        cache = self.manager.open(scope, tokens[:prompt], max_reuse=limit, priority=priority, min_partial=least)
        assert cache.history == cache.capacity == cache.reused <= limit
        partial = cache.history - cache.committed
        assert partial == 0 or 0 < least <= partial < SIZE
        self._claim_copied(cache)
        if limit == prompt:
            # What lies in a tier below comes up only where there are pages for it.
            assert cache.committed <= matched if self.has_below else cache.committed == matched
        assert cache.committed == 0 or (scope, tuple(tokens[: cache.committed])) in self.published
        live = Live(cache, scope, tokens)
        self.live.append(live)
        if steps > 0 and self._reserve(live, prompt):
            if steps > 1:
                self._advance(live, prompt)
            if steps > 2:
                self._commit(live)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(0, 20))
    def reserve(self, data: st.DataObject, more: int) -> None:
        live = data.draw(st.sampled_from(self.live))
        self._reserve(live, min(LENGTH, live.cache.history + more))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        self._advance(live, data.draw(st.integers(live.cache.history, live.cache.capacity)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live and len(self.pins) < 4)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        hold = live.cache.pin()
        contents = []
        for group, table in enumerate(hold.tables):
            ids, first = list(table.block_ids), live.cache.first_block(group)
            assert table.first_block == first
            assert ids == list(live.cache.block_table(group))[: -(-live.cache.history // SIZE) - first]
            contents.append(self._written(group, table, live.cache.history).clone())
        self.pins.append(Held(hold, hold.tables, live.cache.history, contents))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        live = self._take(data, self.live)
        read_only = max(live.cache.committed // SIZE, live.forked)
        expected = [tuple(table[max(0, read_only - first) :]) for table, first in self._tables(live)]
        hold = live.cache.quarantine()
        assert [table.block_ids for table in hold.tables] == expected
        self.closed.append(live.cache)
        self.quarantines.append(Held(hold, hold.tables))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        live = self._take(data, self.live)
        live.cache.close()
        self.closed.append(live.cache)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        before, lengths = self._snapshot(), (live.cache.committed, live.cache.history)
        if not live.cache.suspend():
            assert self._snapshot() == before
            return
        self.live.remove(live)
        self.suspended.append(live)
        assert live.cache.suspended
        assert not any(table for table, _ in self._tables(live))
        assert (live.cache.committed, live.cache.history, live.cache.capacity) == (*lengths, lengths[1])
        self._refused(
            data.draw(st.sampled_from([live.cache.pin, live.cache.suspend, lambda: live.cache.reserve(LENGTH)]))
        )

    @precondition(lambda self: self.suspended)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.suspended))
        cache, before = live.cache, self.manager.counts()
        lengths = (cache.committed, cache.history)
        try:
            cache.resume(live.tokens)
        except OutOfBlocksError:
            assert cache.suspended
            assert self.manager.counts() == before
            assert before.free < -(-cache.history // SIZE) * len(self.layouts)
            return
        self.suspended.remove(live)
        self.live.append(live)
        live.just_committed, live.forked = False, 0
        assert (cache.committed, cache.history) == lengths

    @precondition(lambda self: self.suspended)
    @rule(data=st.data())
    def close_suspended(self, data: st.DataObject) -> None:
        live = self._take(data, self.suspended)
        live.cache.close()
        self.closed.append(live.cache)

    @rule(blocks=st.integers(1, BLOCKS))
    def resize(self, blocks: int) -> None:
        before = self._snapshot()
        row_nbytes = sum(layout.slot_nbytes for layout in self.layouts)
        if max(len(held) for held in self._held()) > blocks:
            with pytest.raises(OutOfBlocksError):
                self.manager.resize(blocks * row_nbytes)
            assert self._snapshot() == before
            return
        self.manager.resize(blocks * row_nbytes)
        self.quota = blocks
        for group, pool in enumerate(self.manager.pools):  # what is withheld has been claimed
            rose = pool.generations > self.generations[group]
            self.generations[group][rose] = pool.generations[rose]

    @precondition(lambda self: self.pins or self.quarantines)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.pins + self.quarantines))
        held.hold.release()
        (self.pins if held in self.pins else self.quarantines).remove(held)
        with pytest.raises(CacheStateError):
            held.hold.release()

    @rule()
    def clear_reuse(self) -> None:
        self.manager.clear_reuse()
        self.connector.blocks.clear()
        for scope in SCOPES:
            for tokens in SEQUENCES:
                assert self.manager.match(scope, tokens) <= self._committed_by_live(scope, tokens)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def use_after_close(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(self.closed))
        calls: list[Callable[[], object]] = [
            cache.close,
            cache.pin,
            cache.quarantine,
            lambda: cache.reserve(1),
            lambda: cache.advance(1),
            lambda: cache.commit([1] * LENGTH),
        ]
        self._refused(data.draw(st.sampled_from(calls)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(self.live)).cache
        calls: list[Callable[[], object]] = [
            lambda: cache.reserve(cache.history - 1),
            lambda: cache.advance(cache.history - 1),
            lambda: cache.advance(cache.capacity + 1),
        ]
        if cache.history >= SIZE:
            calls.append(lambda: cache.commit([1] * (cache.history // SIZE * SIZE - 1)))
        self._refused(data.draw(st.sampled_from(calls)))

    # -- invariants -------------------------------------------------------------------------------------

    @invariant()
    def structure(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def block_counts(self) -> None:
        for live in self.live:
            cache = live.cache
            assert max(cache.reused, cache.committed) <= cache.history <= cache.capacity
            for group, layout in enumerate(self.layouts):
                first, table = cache.first_block(group), cache.block_table(group)
                needed = first_needed_token(layout, cache.history) // SIZE if self.drops_stale else 0
                assert first <= needed
                assert first == needed or not live.just_committed
                assert first + len(table) == max(first, -(-cache.capacity // SIZE))

    @invariant()
    def contents(self) -> None:
        for live in self.live:
            history = live.cache.history
            for group, pool in enumerate(self.manager.pools):
                table, first = list(live.cache.block_table(group)), live.cache.first_block(group)
                held = pool.view[table][:, -1, -1, 0, :, 0].flatten().tolist()
                expected = [expected_value(live.scope, live.tokens[: p + 1]) for p in range(first * SIZE, history)]
                assert held[: len(expected)] == expected

    @invariant()
    def one_writer(self) -> None:
        for group in range(len(self.layouts)):
            private: list[int] = []
            shared: set[int] = set()
            for live in self.live:
                table, first = list(live.cache.block_table(group)), live.cache.first_block(group)
                own = max(0, live.cache.committed // SIZE - first, live.forked - first)
                shared |= set(table[:own])
                private += table[own:]
            private += [slot for held in self.quarantines for slot in held.tables[group].block_ids]
            assert len(private) == len(set(private)), "a slot has two writers"
            assert not shared & set(private), "a committed block has a writer"

    @invariant()
    def conserved(self) -> None:
        counts = self.manager.counts()
        held = sum(len(slots) for slots in self._held())
        assert counts.total == self.quota * len(self.layouts)
        assert counts.free == counts.total - held
        assert counts.cached <= counts.free
        assert counts.pinned == sum(len(slots) for slots in self._slots_of(self.pins))
        assert counts.quarantined == sum(len(slots) for slots in self._slots_of(self.quarantines))
        most = min(self.quota - len(slots) for slots in self._held()) * SIZE
        assert self.manager.can_reserve(most)
        assert not self.manager.can_reserve(most + 1)

    @invariant()
    def pinned_bytes(self) -> None:
        for held in self.pins:
            for group, (pool, table) in enumerate(zip(self.manager.pools, held.tables, strict=True)):
                assert pool.generations[list(table.block_ids)].tolist() == list(table.generations)
                now = self._written(group, table, held.history)
                assert torch.equal(now, held.contents[group])

    @invariant()
    def generations_rise_at_allocation_only(self) -> None:
        for group, pool in enumerate(self.manager.pools):
            if self.has_below:  # blocks come up at other times too
                break
            rose = (pool.generations > self.generations[group]).nonzero().flatten().tolist()
            assert set(rose) == self.claimed[group]
            assert bool((pool.generations >= self.generations[group]).all())
            self.generations[group] = pool.generations.clone()
            self.claimed[group] = set()

    @invariant()
    def live_prefixes_are_found(self) -> None:
        if self.drops_stale:
            return  # what a window let go of may be gone
        for live in self.live:
            if live.cache.committed:
                assert self.manager.match(live.scope, live.tokens) >= live.cache.committed

    def teardown(self) -> None:
        for live in self.live + self.suspended:
            live.cache.close()
        for held in self.pins + self.quarantines:
            held.hold.release()
        self.manager.resize(BLOCKS * sum(layout.slot_nbytes for layout in self.layouts))
        self.manager.check_integrity()
        counts = self.manager.counts()
        assert (counts.free, counts.pinned, counts.quarantined) == (self.start.total, 0, 0)
        self.manager.clear_reuse()
        self.manager.check_integrity()
        assert self.manager.counts() == self.start
        for tier in self.manager.tier_counts():
            assert (tier.free, tier.kept, tier.parked) == (tier.total, 0, 0)

    # -- what the steps do ------------------------------------------------------------------------------

    def _claim_copied(self, cache: KVCache) -> None:
        """A block that opening copied has been claimed."""
        if cache.history > cache.committed:
            for group in range(len(self.layouts)):
                self.claimed[group].add(cache.block_table(group)[-1])

    def _reserve(self, live: Live, capacity: int) -> bool:
        """Reserves where the model says there is room, checks the refusal where there is none."""
        blocks = max(-(-capacity // SIZE), -(-live.cache.capacity // SIZE))
        before, tables = self._snapshot(), self._tables(live)
        copied = capacity > live.cache.capacity and self._shares_its_tail(live)
        needs = [blocks - first - len(table) + copied for table, first in tables]
        if any(need > self.quota - len(held) for need, held in zip(needs, self._held(), strict=True)):
            with pytest.raises(OutOfBlocksError, match=r"kv_cache\.bytes"):
                live.cache.reserve(capacity)
            assert self._snapshot() == before
            return False
        live.cache.reserve(capacity)
        assert live.cache.capacity >= capacity
        for group, (table, _) in enumerate(tables):
            now, kept = list(live.cache.block_table(group)), len(table) - copied
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
        for group, pool in enumerate(self.manager.pools):
            table, first = live.cache.block_table(group), live.cache.first_block(group)
            for position in range(start, stop):
                value = expected_value(live.scope, live.tokens[: position + 1])
                pool.view[table[position // SIZE - first], :, :, 0, position % SIZE, 0] = value
        live.cache.advance(stop)
        live.just_committed = live.just_committed and stop == start

    def _commit(self, live: Live) -> None:
        history = live.cache.history
        live.cache.commit(live.tokens[:history])
        assert live.cache.committed == history // SIZE * SIZE
        live.just_committed = True
        for blocks in range(1, history // SIZE + 1):
            self.published.add((live.scope, tuple(live.tokens[: blocks * SIZE])))

    # -- the model --------------------------------------------------------------------------------------

    def _take(self, data: st.DataObject, among: list[Live]) -> Live:
        live = data.draw(st.sampled_from(among))
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

    def _committed_by_live(self, scope: str, tokens: list[int]) -> int:
        shared = [0]
        for live in self.live:
            if live.scope == scope:
                common = next((i for i in range(LENGTH) if live.tokens[i] != tokens[i]), LENGTH)
                shared.append(min(common // SIZE * SIZE, live.cache.committed))
        return max(shared)

    def _written(self, group: int, table: BlockTable, history: int) -> torch.Tensor:
        """The bytes of the positions below `history`: a partly filled last block may be written on behind them."""
        tokens = self.manager.pools[group].view[list(table.block_ids)].transpose(1, 4).flatten(0, 1)
        return tokens[: max(0, history - table.first_block * SIZE)]

    def _snapshot(self) -> object:
        lengths = [(c.cache.committed, c.cache.history, c.cache.capacity, self._tables(c)) for c in self.live]
        matches = [self.manager.match(scope, tokens) for scope in SCOPES for tokens in SEQUENCES]
        return lengths, matches, self.manager.counts(), [p.generations.tolist() for p in self.manager.pools]

    def _refused(self, call: Callable[[], object]) -> None:
        before = self._snapshot()
        with pytest.raises(CacheStateError):
            call()
        assert self._snapshot() == before
