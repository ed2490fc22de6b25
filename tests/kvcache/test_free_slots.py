"""Runs of free slots."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kvcache.free_slots import FreeSlots


def test_slots_come_in_ascending_runs_and_join_again() -> None:
    free = FreeSlots(10)
    assert free.take(4) == [0, 1, 2, 3]
    assert free.take(3) == [4, 5, 6]
    for slot in (1, 3, 2, 0):
        free.put(slot)
    free.check_integrity()
    assert free.take(4) == [0, 1, 2, 3]


def test_a_cache_grows_into_the_slot_behind_its_last_one() -> None:
    free = FreeSlots(10)
    free.take(9)
    for slot in (2, 5, 6, 7):
        free.put(slot)
    assert free.take(2, after=4) == [5, 6]
    assert free.take(1, after=1) == [2]
    assert free.take(2, after=2) == [7, 9], "slot 3 is taken: any free ones do"


def test_small_requests_leave_large_runs_whole() -> None:
    free = FreeSlots(64)
    free.take(64)
    for slot in [0, *range(10, 42)]:
        free.put(slot)
    assert free.take(1) == [0]
    assert free.take(32) == list(range(10, 42))


def test_a_request_that_fits_no_run_is_put_together_from_the_longest() -> None:
    free = FreeSlots(20)
    free.take(20)
    for slot in (0, 1, 2, 5, 8, 9):
        free.put(slot)
    taken = free.take(6)
    assert sorted(taken) == [0, 1, 2, 5, 8, 9]
    assert len(free) == 0


@settings(deadline=None)
@given(st.integers(0, 60), st.randoms(use_true_random=False))
def test_no_slot_is_lost_or_given_twice(size: int, rng: random.Random) -> None:
    free, taken = FreeSlots(size), list[int]()
    for _ in range(80):
        if taken and rng.random() < 0.5:
            rng.shuffle(taken)
            for _ in range(rng.randint(1, len(taken))):
                free.put(taken.pop())
        else:
            after = rng.choice(taken) if taken else None
            taken += free.take(rng.randint(0, len(free)), after)
        free.check_integrity()
        assert sorted([*free, *taken]) == list(range(size))
        assert len(free) == size - len(taken)
