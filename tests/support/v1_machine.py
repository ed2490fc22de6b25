"""What only manager V1 does, for its state machine: beams that fork, and a store outside that misbehaves."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from kv_machine import ManagerMachine
from kv_model import FULL, LENGTH, SIZE, WHICH, WINDOW, Live, pick
from memory_connector import Mood

from kvferry.kvcache import ForkableCache


class V1Machine(ManagerMachine):
    version = "V1"
    layouts = (FULL, WINDOW)

    @precondition(lambda self: 0 < len(self.live) < 5)
    @rule(which=WHICH, branches=st.booleans())
    def fork(self, which: int, branches: bool) -> None:
        """branches: whether the twin goes on with other tokens."""
        live = pick(self.live, which)
        assert isinstance(live.cache, ForkableCache)
        if live.loaded > live.cache.history:
            self._refused(live.cache.fork)
            return
        tables, history = self._tables(live), live.cache.history
        live.near = history
        twin = Live(live.cache.fork(), live.scope, live.tokens, live.just_committed, near=history)
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
