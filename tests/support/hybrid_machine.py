"""A state machine over managers of models with recurrent states, beside `kv_machine`, which knows attention alone.

Whatever happens, the state a request goes on from is the one its own tokens made, and a prefix is found only where
somebody took a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core import BlockTable, GroupKind, KVLayout
from kvferry.kvcache import BlockHold, CacheStateError, KVCache, OutOfBlocksError, create_manager
from kvferry.kvcache.pool import slot_counts

SIZE, BLOCKS, LENGTH = 4, 40, 60
CONV = KVLayout(GroupKind.CONV, (0, 2), 1, 3, tokens_per_block=1, planes=1)
FULL = KVLayout(GroupKind.FULL, (1,), 1, 1, tokens_per_block=SIZE)
SSM = KVLayout(GroupKind.SSM, (0, 2), 2, 2, tokens_per_block=1, planes=1)
LAYOUTS = (CONV, FULL, SSM)
STATES, STATE_GROUPS = slot_counts(LAYOUTS, BLOCKS)[0], (0, 2)
SEQUENCES = ([1] * LENGTH, [1] * 8 + [2] * (LENGTH - 8), [1] * 14 + [3] * (LENGTH - 14))
SCOPES = ("", "salt")


def recurrence(scope: str, tokens: list[int], state: int = 0) -> int:
    """Exact in float32."""
    for token in tokens:
        state = (31 * state + token + 7 * len(scope)) % 65_521
    return state


def nbytes_of(blocks: int) -> int:
    return sum(slots * layout.slot_nbytes for slots, layout in zip(slot_counts(LAYOUTS, blocks), LAYOUTS, strict=True))


@dataclass(eq=False)
class Live:
    cache: KVCache
    scope: str
    tokens: list[int] = field(repr=False)


@dataclass(eq=False)
class Pinned:
    hold: BlockHold
    tables: tuple[BlockTable, ...]
    state: float


class HybridMachine(RuleBasedStateMachine):
    version: ClassVar[str]
    core: ClassVar[str] = "cpp"
    host_blocks: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.reuse = self.version == "V2"
        self.manager = create_manager(
            self.version,
            LAYOUTS,
            nbytes_of(BLOCKS),
            core=self.core,
            debug=True,
            prefix_reuse=self.reuse,
            host_bytes=nbytes_of(self.host_blocks) if self.host_blocks else 0,
        )
        assert self.manager.takes_snapshots == self.reuse
        self.start = self.manager.counts()
        self.live: list[Live] = []
        self.suspended: list[Live] = []
        self.pins: list[Pinned] = []
        self.quarantines: list[BlockHold] = []
        self.snapshots: set[tuple[str, tuple[int, ...]]] = set()

    # -- steps ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        tokens=st.sampled_from(SEQUENCES),
        scope=st.sampled_from(SCOPES),
        prompt=st.integers(1, LENGTH),
        run=st.booleans(),
    )
    def open(self, tokens: list[int], scope: str, prompt: int, run: bool) -> None:
        matched = self.manager.match(scope, tokens[:prompt])
        cache = self.manager.open(scope, tokens[:prompt], max_reuse=prompt - 1)
        assert cache.history == cache.capacity == cache.committed == cache.reused <= max(0, prompt - 1)
        assert cache.reused == 0 or (scope, tuple(tokens[: cache.reused])) in self.snapshots
        assert cache.reused <= matched
        live = Live(cache, scope, tokens)
        self.live.append(live)
        if run:
            self._compute(live, prompt)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(1, 12), snapshot=st.booleans())
    def compute(self, data: st.DataObject, more: int, snapshot: bool) -> None:
        live = data.draw(st.sampled_from(self.live))
        stop = min(LENGTH, live.cache.history + more)
        if snapshot:
            stop = max(stop // SIZE * SIZE, live.cache.history)
        if self._compute(live, stop) and snapshot and live.cache.history == live.cache.committed > 0:
            taken = live.cache.snapshot()
            assert taken <= self.reuse
            if taken:
                self.snapshots.add((live.scope, tuple(live.tokens[: live.cache.history])))

    def _compute(self, live: Live, stop: int) -> bool:
        """Reserves, makes the state go on from what the cache holds, and commits; False where there was no room."""
        cache, before = live.cache, self.manager.counts()
        if stop <= cache.history:
            return False
        first = cache.capacity == 0 and not cache.block_table(0)
        try:
            cache.reserve(stop)
        except OutOfBlocksError:
            assert self.manager.counts() == before
            assert self._is_short(live, stop)
            return False
        if first:
            assert self._state(cache) == 0.0, "a sequence starts from zeros"
        start = cache.history
        state = recurrence(live.scope, live.tokens[start:stop], int(self._state(cache)))
        for group in STATE_GROUPS:
            self.manager.pools[group].view[list(cache.block_table(group))] = float(state)
        cache.advance(stop)
        cache.commit(live.tokens)
        return True

    def _is_short(self, live: Live, stop: int) -> bool:
        """Whether a group lacks slots: blocks for the tokens, or a state of its own."""
        held = self._held()
        blocks = -(-stop // SIZE) - len(live.cache.block_table(1)) > BLOCKS - len(held[1])
        return blocks or any(len(held[group]) >= STATES - 1 for group in STATE_GROUPS)

    @precondition(lambda self: self.live and len(self.pins) < 3)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        hold = live.cache.pin()
        assert len(hold.tables) == len(LAYOUTS)
        for group in STATE_GROUPS:
            used = live.cache.block_table(group) if live.cache.history or self.version == "V1" else ()
            assert list(hold.tables[group].block_ids) == list(used)
            assert hold.tables[group].first_block == 0
        if not live.cache.history:
            hold.release()
            return
        self.pins.append(Pinned(hold, hold.tables, self._state(live.cache)))
        live.cache.close()  # as a prefill worker does: what is pinned outlives its request
        self.live.remove(live)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        self.quarantines.append(live.cache.quarantine())
        with pytest.raises(CacheStateError):
            live.cache.close()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        live.cache.close()
        for misuse in (live.cache.close, live.cache.pin, lambda: live.cache.reserve(9)):
            with pytest.raises(CacheStateError):
                misuse()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        if live.cache.suspend():
            assert self.host_blocks
            self.live.remove(live)
            self.suspended.append(live)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.suspended))
        try:
            live.cache.resume(live.tokens)
        except OutOfBlocksError:
            assert live.cache.suspended
            return
        self.suspended.remove(live)
        self.live.append(live)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pinned)
        pinned.hold.release()
        with pytest.raises(CacheStateError):
            pinned.hold.release()

    @precondition(lambda self: self.quarantines)
    @rule()
    def end_quarantine(self) -> None:
        self.quarantines.pop().release()

    @rule(blocks=st.integers(1, BLOCKS))
    def resize(self, blocks: int) -> None:
        before = self.manager.counts()
        try:
            self.manager.resize(nbytes_of(blocks))
        except OutOfBlocksError:
            assert self.manager.counts() == before
        else:
            self.manager.resize(nbytes_of(BLOCKS))

    @rule()
    def clear_reuse(self) -> None:
        self.manager.clear_reuse()

    # -- invariants -------------------------------------------------------------------------------------

    @invariant()
    def structure(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def every_state_is_that_of_its_tokens(self) -> None:
        for live in self.live:
            if live.cache.block_table(0):
                expected = recurrence(live.scope, live.tokens[: live.cache.history])
                assert self._state(live.cache) == expected

    @invariant()
    def one_writer(self) -> None:
        for group in STATE_GROUPS:
            own = [slot for live in self.live if live.cache.capacity for slot in live.cache.block_table(group)]
            reused = [
                slot
                for live in self.live
                if live.cache.capacity == live.cache.reused > 0
                for slot in live.cache.block_table(group)
            ]
            own = [slot for slot in own if slot not in reused]
            own += [slot for hold in self.quarantines for slot in hold.tables[group].block_ids]
            assert len(own) == len(set(own)), "a state has two writers"
            assert not set(own) & set(reused), "a snapshot has a writer"

    @invariant()
    def pinned_states_stay(self) -> None:
        for pinned in self.pins:
            for group in STATE_GROUPS:
                pool, table = self.manager.pools[group], pinned.tables[group]
                assert pool.view[list(table.block_ids)].unique().tolist() == [pinned.state]
                assert pool.generations[list(table.block_ids)].tolist() == list(table.generations)

    @invariant()
    def conserved(self) -> None:
        counts = self.manager.counts()
        assert counts.total == self.start.total
        assert counts.free == counts.total - sum(len(slots) for slots in self._held())

    @invariant()
    def prefixes_end_at_snapshots(self) -> None:
        for scope in SCOPES:
            for tokens in SEQUENCES:
                matched = self.manager.match(scope, tokens)
                assert matched == 0 or (scope, tuple(tokens[:matched])) in self.snapshots

    def teardown(self) -> None:
        for live in self.live + self.suspended:
            live.cache.close()
        for hold in [*(pinned.hold for pinned in self.pins), *self.quarantines]:
            hold.release()
        self.manager.clear_reuse()
        self.manager.check_integrity()
        assert self.manager.counts() == self.start

    # -- the model --------------------------------------------------------------------------------------

    def _state(self, cache: KVCache) -> float:
        """The one value that all elements of both states have."""
        values = torch.cat(
            [self.manager.pools[group].view[list(cache.block_table(group))].flatten() for group in (0, 2)]
        )
        (value,) = values.unique().tolist()
        return float(value)

    def _held(self) -> list[set[int]]:
        held: list[set[int]] = [set() for _ in LAYOUTS]
        for group, slots in enumerate(held):
            for live in self.live:
                slots |= set(live.cache.block_table(group))
            for hold in [*(pinned.hold for pinned in self.pins), *self.quarantines]:
                slots |= set(hold.tables[group].block_ids)
        return held
