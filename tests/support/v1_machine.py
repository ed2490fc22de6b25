"""What only manager V1 does, for its state machine: beams that fork, and a store outside that misbehaves."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from kv_machine import FULL, LENGTH, SIZE, WINDOW, Live, ManagerMachine
from memory_connector import Mood

from kvferry.kvcache import ForkableCache


class V1Machine(ManagerMachine):
    version = "V1"
    layouts = (FULL, WINDOW)

    @precondition(lambda self: 0 < len(self.live) < 5)
    @rule(data=st.data(), branches=st.booleans())
    def fork(self, data: st.DataObject, branches: bool) -> None:
        """branches: whether the twin goes on with other tokens."""
        live = data.draw(st.sampled_from(self.live))
        assert isinstance(live.cache, ForkableCache)
        tables, history = self._tables(live), live.cache.history
        twin = Live(live.cache.fork(), live.scope, live.tokens, live.just_committed)
        if branches:
            twin.tokens = live.tokens[:history] + [9] * (LENGTH - history)
        live.forked = twin.forked = -(-history // SIZE)
        self.live.append(twin)
        for both in (live, twin):
            assert (both.cache.committed, both.cache.history) == (live.cache.committed, history)
            assert both.cache.capacity == history
            assert self._tables(both) == [(table[: live.forked], first) for table, first in tables]

    @precondition(lambda self: self.external)
    @rule(mood=st.sampled_from(Mood))
    def change_the_connector_s_mood(self, mood: Mood) -> None:
        self.connector.mood = mood
