"""A state machine that drives a KV cache manager at random and compares it with a model that only knows contents.

Every cache that is written gets values that are a function of scope and prefix alone, so a wrong block, a second
writer or an early reuse shows as a wrong value somewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from kv_model import (
    BLOCKS,
    LENGTH,
    SCOPES,
    SEQUENCES,
    SIZE,
    WHICH,
    Held,
    Live,
    ManagerModel,
    first_needed_token,
    pick,
)

from kvferry.core import ConfigError
from kvferry.kvcache import CacheStateError, OutOfBlocksError, RowCopy
from kvferry.kvcache.pool import slot_counts


class ManagerMachine(ManagerModel):
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
        reusable = self.published & self.snapshots if self.states else self.published
        assert cache.committed == 0 or (scope, tuple(tokens[: cache.committed])) in reusable
        live = Live(cache, scope, tokens, near=cache.capacity)
        self.live.append(live)
        if steps > 0 and self._reserve(live, prompt):
            if steps > 1:
                self._advance(live, prompt)
            if steps > 2:
                self._commit(live)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, more=st.integers(0, 20), ahead=st.sampled_from([None, None, 1, 6]))
    def reserve(self, which: int, more: int, ahead: int | None) -> None:
        live = pick(self.live, which)
        self._reserve(live, max(live.loaded, min(LENGTH, live.cache.history + more)), ahead)

    @precondition(lambda self: len(self.live) < 5)
    @rule(tokens=st.sampled_from(SEQUENCES), prompt=st.integers(2, LENGTH), arrives=st.booleans())
    def receive(self, tokens: list[int], prompt: int, arrives: bool) -> None:
        """Opens a cache for a prompt whose KV comes from elsewhere, all but the last token's."""
        matched = self.manager.match("", tokens[: prompt - 1])
        cache = self.manager.open("", tokens[:prompt], max_reuse=prompt - 1, loads=True)
        live = Live(cache, "", tokens, near=cache.capacity)
        self.live.append(live)
        assert cache.reused == 0 or ("", tuple(tokens[: cache.reused])) in self.published
        if cache.lacks_windows:
            assert self.drops_stale or self.states
            assert matched < cache.reused < prompt - 1
            live.loaded, live.just_committed = prompt - 1, False
            windows = [group for group, layout in enumerate(self.layouts) if layout.window]
            live.near = min([cache.reused, *(cache.first_block(group) * SIZE for group in windows)])
        if self._reserve(live, prompt, loaded=prompt - 1) and arrives:
            self._advance(live, prompt - 1)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, more=st.integers(0, 20))
    def advance(self, which: int, more: int) -> None:
        live = pick(self.live, which)
        if live.loading and live.near < live.loaded:
            return
        stop = min(live.cache.history + more, live.near)
        self._advance(live, live.loaded if live.cache.history < live.loaded else stop)

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def commit(self, which: int) -> None:
        self._commit(pick(self.live, which))

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def snapshot(self, which: int) -> None:
        live = pick(self.live, which)
        cache = live.cache
        if self.version == "V1":
            assert not cache.snapshot()
        elif live.loading or not 0 < cache.history == cache.committed:
            self._refused(cache.snapshot)
        elif cache.snapshot():
            assert self.states
            self.snapshots.add((live.scope, tuple(live.tokens[: cache.history])))

    @precondition(lambda self: self.live and len(self.pins) < 4)
    @rule(which=WHICH)
    def pin(self, which: int) -> None:
        live = pick(self.live, which)
        if live.late and live.loading:
            self._refused(live.cache.pin)
            return
        hold = live.cache.pin()
        contents = []
        for group, table in enumerate(hold.tables):
            ids, first = list(table.block_ids), live.cache.first_block(group)
            assert table.first_block == first
            blocks = -(-live.cache.history // SIZE)
            held = min(1, blocks) if group in self.states else max(0, blocks - first)
            assert ids == list(live.cache.block_table(group))[:held]
            contents.append(self._written(group, table, live.cache.history).copy())
        self.pins.append(Held(hold, hold.tables, live.cache.history, contents))

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def quarantine(self, which: int) -> None:
        live = self._take(which, self.live)
        read_only = max(live.cache.committed // SIZE, live.forked)
        expected = [
            tuple(table if live.late and layout.window else table[max(0, read_only - first) :])
            for (table, first), layout in zip(self._tables(live), self.layouts, strict=True)
        ]
        for group in self.states:
            expected[group] = tuple(live.cache.block_table(group)) if self._owns_state(live) else ()
        hold = live.cache.quarantine()
        assert [table.block_ids for table in hold.tables] == expected
        self.closed.append(live.cache)
        self.quarantines.append(Held(hold, hold.tables))

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def close(self, which: int) -> None:
        live = self._take(which, self.live)
        live.cache.close()
        self.closed.append(live.cache)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, call=WHICH)
    def suspend(self, which: int, call: int) -> None:
        live = pick(self.live, which)
        if live.loaded > live.cache.history:
            self._refused(live.cache.suspend)
            return
        before, lengths = self._seen(), (live.cache.committed, live.cache.history)
        if not live.cache.suspend():
            assert self._seen() == before
            return
        self.live.remove(live)
        self.suspended.append(live)
        assert live.cache.suspended
        assert not any(table for table, _ in self._tables(live))
        assert (live.cache.committed, live.cache.history, live.cache.capacity) == (*lengths, lengths[1])
        calls: list[Callable[[], object]] = [live.cache.pin, live.cache.suspend, lambda: live.cache.reserve(LENGTH)]
        self._refused(pick(calls, call))

    @precondition(lambda self: self.suspended)
    @rule(which=WHICH)
    def resume(self, which: int) -> None:
        live = pick(self.suspended, which)
        cache, before = live.cache, self.manager.counts()
        lengths = (cache.committed, cache.history)
        try:
            cache.resume(live.tokens)
        except OutOfBlocksError:
            assert cache.suspended
            assert self.manager.counts() == before
            if self.typical is None:
                blocks = -(-cache.history // SIZE)
                assert any(counts.free < blocks for counts in self.manager.group_counts())
            return
        self.suspended.remove(live)
        self.live.append(live)
        live.just_committed, live.resumed, live.near = False, cache.history > 0, cache.history
        live.forked = 0
        assert (cache.committed, cache.history) == lengths

    @precondition(lambda self: self.suspended)
    @rule(which=WHICH)
    def close_suspended(self, which: int) -> None:
        live = self._take(which, self.suspended)
        live.cache.close()
        self.closed.append(live.cache)

    @rule(blocks=st.integers(1, BLOCKS))
    def resize(self, blocks: int) -> None:
        if self.typical is not None:
            self._resize_shared(blocks)
            return
        quota = slot_counts(self.layouts, blocks)
        if any(len(held) > slots for held, slots in zip(self._held(), quota, strict=True)):
            before = self._seen()
            with pytest.raises(OutOfBlocksError):
                self.manager.resize(self._nbytes(blocks))
            assert self._seen() == before
            return
        if self._unless_copying(lambda: self.manager.resize(self._nbytes(blocks))):
            self._quota = quota
        self._forget_generations()

    def _resize_shared(self, blocks: int) -> None:
        before = self._seen()
        try:
            self.manager.resize(self._nbytes(blocks))
        except (OutOfBlocksError, ConfigError):
            assert self._seen() == before
        self._forget_generations()

    @precondition(lambda self: self.pins or self.quarantines)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        held = pick(self.pins + self.quarantines, which)
        held.hold.release()
        (self.pins if held in self.pins else self.quarantines).remove(held)
        with pytest.raises(CacheStateError):
            held.hold.release()

    @precondition(lambda self: self.copier.waiting)
    @rule(which=WHICH)
    def copy(self, which: int) -> None:
        pick(self.copier.waiting, which).make()

    @precondition(lambda self: self.copies_later)
    @rule()
    def poll(self) -> None:
        made = self.copying
        assert self.manager.poll() == (made or self.copying)
        assert self.copying == bool(self.copier.waiting)
        self._forget_generations()

    @precondition(lambda self: self.copies_later)
    @rule(tokens=st.sampled_from(SEQUENCES), scope=st.sampled_from(SCOPES), prompt=st.integers(1, LENGTH))
    def prefetch(self, tokens: list[int], scope: str, prompt: int) -> None:
        matched, lengths = self.manager.match(scope, tokens[:prompt]), self._seen_lengths()
        if not self.manager.prefetch(scope, tokens[:prompt]):
            assert self.copying
        assert self.manager.match(scope, tokens[:prompt]) == matched
        assert self._seen_lengths() == lengths

    @precondition(lambda self: self.copies_later and self.suspended)
    @rule(which=WHICH)
    def prepare_resume(self, which: int) -> None:
        live = pick(self.suspended, which)
        ready = live.cache.prepare_resume(live.tokens)
        assert ready or self.copying
        assert live.cache.suspended
        assert not any(table for table, _ in self._tables(live))

    @rule()
    def clear_reuse(self) -> None:
        self.manager.clear_reuse()
        self.connector.blocks.clear()
        if self.pages_away:  # what is under way has pages, and with them their prefixes
            return
        for scope in SCOPES:
            for tokens in SEQUENCES:
                assert self.manager.match(scope, tokens) <= self._committed_by_live(scope, tokens, by_forks=True)

    @precondition(lambda self: self.closed)
    @rule(which=WHICH, call=WHICH)
    def use_after_close(self, which: int, call: int) -> None:
        cache = pick(self.closed, which)
        calls: list[Callable[[], object]] = [
            cache.close,
            cache.pin,
            cache.quarantine,
            lambda: cache.reserve(1),
            lambda: cache.advance(1),
            lambda: cache.commit([1] * LENGTH),
        ]
        self._refused(pick(calls, call))

    @precondition(lambda self: self.live)
    @rule(which=WHICH, call=WHICH)
    def misuse(self, which: int, call: int) -> None:
        cache = pick(self.live, which).cache
        calls: list[Callable[[], object]] = [
            lambda: cache.reserve(cache.history - 1),
            lambda: cache.advance(cache.history - 1),
            lambda: cache.advance(cache.capacity + 1),
        ]
        if cache.history <= pick(self.live, which).near < cache.capacity:
            calls.append(lambda: cache.advance(pick(self.live, which).near + 1))
        if pick(self.live, which).loaded > cache.history + 1:
            calls.append(lambda: cache.advance(cache.history + 1))
        if cache.history >= SIZE:
            calls.append(lambda: cache.commit([1] * (cache.history // SIZE * SIZE - 1)))
        self._refused(pick(calls, call))

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
                if group in self.states:
                    assert (first, len(table)) == (0, int(self._holds_state(live)))
                    continue
                seen_from = max(cache.history, live.loaded)
                needed = first_needed_token(layout, seen_from) // SIZE if self.drops_stale else 0
                assert first <= needed
                assert first == needed or not live.just_committed
                reach = live.near if self.drops_stale and layout.window else cache.capacity
                assert first + len(table) == max(first, -(-reach // SIZE))

    @invariant()
    def contents(self) -> None:
        for live in self.live:
            history, values = live.cache.history, live.values
            for group, view in enumerate(self.views):
                table, first = list(live.cache.block_table(group)), live.cache.first_block(group)
                if live.loading and (group in self.states or (live.late and self.layouts[group].window)):
                    continue
                if group in self.states:
                    assert (view[table] == live.state).all()
                    continue
                held = view[table, -1, -1, 0, :, 0].ravel()
                expected = values[first * SIZE : history]
                assert (held[: len(expected)] == expected).all()

    @invariant()
    def one_writer(self) -> None:
        for group in range(len(self.layouts)):
            private: list[int] = []
            shared: set[int] = set()
            for live in self.live:
                table, first = list(live.cache.block_table(group)), live.cache.first_block(group)
                own = max(0, live.cache.committed // SIZE - first, live.forked - first)
                if live.late and self.layouts[group].window:
                    own = 0
                if group in self.states:
                    own = 0 if self._owns_state(live) else len(table)
                shared |= set(table[:own])
                private += table[own:]
            private += [slot for held in self.quarantines for slot in held.tables[group].block_ids]
            copied = [
                slot
                for copy in self._copies()
                if copy.target.data_ptr() == self.manager.pools[group].buffer.data_ptr() and self.typical is None
                for slot in copy.to
            ]
            assert not set(copied) & shared, "a copy writes a committed block"
            private += copied
            assert len(private) == len(set(private)), "a slot has two writers"
            assert not shared & set(private), "a committed block has a writer"

    def _copies(self) -> list[RowCopy]:
        return [copy for pending in self.copier.waiting for copy in pending.copies]

    @invariant()
    def one_copy_to_each_slot_below(self) -> None:
        pools = [pool.buffer.data_ptr() for pool in self.manager.pools]
        targets = [
            (copy.target.data_ptr(), slot)
            for copy in self._copies()
            if copy.target.data_ptr() not in pools
            for slot in copy.to
        ]
        assert len(targets) == len(set(targets))

    @invariant()
    def conserved(self) -> None:
        counts, quotas, held_slots = self.manager.counts(), self.quota, self._held()
        held = sum(len(slots) for slots in held_slots)
        assert counts.total == sum(quotas)
        slots_nbytes = sum(n * slot_nbytes for n, slot_nbytes in zip(quotas, self.slot_nbytes, strict=True))
        assert slots_nbytes <= self._nbytes(BLOCKS)
        pinned = sum(len(slots) for slots in self._slots_of(self.pins))
        assert counts.cached <= counts.free
        assert counts.quarantined == sum(len(slots) for slots in self._slots_of(self.quarantines))
        if self.pages_away:
            assert counts.free <= counts.total - held
            assert counts.pinned >= pinned
            return
        assert counts.free == counts.total - held
        assert counts.pinned == pinned
        if self.typical is not None:
            return
        room = [quota - len(slots) for quota, slots in zip(quotas, held_slots, strict=True)]
        most = min(slots for group, slots in enumerate(room) if group not in self.states) * SIZE
        if any(room[group] == 0 for group in self.states):
            most = 0
        assert self.manager.can_reserve(most)
        assert not self.manager.can_reserve(most + 1)

    @invariant()
    def pinned_bytes(self) -> None:
        for held in self.pins:
            for group, table in enumerate(held.tables):
                assert self.counters[group][list(table.block_ids)].tolist() == list(table.generations)
                if group not in self.states:  # a state goes on in place, which its reader is told of by its history
                    assert np.array_equal(self._written(group, table, held.history), held.contents[group])

    @invariant()
    def generations_rise_at_allocation_only(self) -> None:
        if self.has_below or self.typical is not None:  # claimed at other times too
            return
        for group, counters in enumerate(self.counters):
            rose = np.flatnonzero(counters > self.generations[group]).tolist()
            if group not in self.states:  # snapshots take slots of their own
                assert set(rose) == self.claimed[group]
            assert (counters >= self.generations[group]).all()
            self.generations[group] = counters.copy()
            self.claimed[group] = set()

    @invariant()
    def live_prefixes_are_found(self) -> None:
        if self.drops_stale or self.states:
            return  # what a window let go of may be gone; a state is found at snapshots only, which may be evicted
        for live in self.live:
            if live.cache.committed:
                assert self.manager.match(live.scope, live.tokens) >= live.cache.committed

    def teardown(self) -> None:
        for live in self.live + self.suspended:
            live.cache.close()
        for held in self.pins + self.quarantines:
            held.hold.release()
        while self.copying:
            for copy in self.copier.waiting[::-1]:
                copy.make()
            self.manager.poll()
        self.manager.resize(self._nbytes(BLOCKS))
        self.manager.check_integrity()
        counts = self.manager.counts()
        assert (counts.free, counts.pinned, counts.quarantined) == (counts.total, 0, 0)
        self.manager.clear_reuse()
        self.manager.check_integrity()
        if self.typical is None:
            assert self.manager.counts() == self.start
        for tier in self.manager.tier_counts():
            assert (tier.free, tier.kept, tier.parked) == (tier.total, 0, 0)
        self.manager.close()
