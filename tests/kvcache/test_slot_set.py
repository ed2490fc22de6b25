"""Slots, and the nearest one below another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kvcache.slot_set import SlotSet


@pytest.mark.parametrize("size", [1, 1024, 1025, 3_000_000])
def test_the_nearest_slot_below_is_found_over_any_distance(size: int) -> None:
    slots = SlotSet(size)
    assert slots.last_up_to(size - 1) is None
    slots.add(0)
    assert slots.last_up_to(size - 1) == 0
    slots.add(size - 1)
    assert slots.last_up_to(size - 1) == size - 1
    if size > 1:
        assert slots.last_up_to(size - 2) == 0
        slots.remove(0)
        assert slots.last_up_to(size - 2) is None


@given(st.sets(st.integers(0, 4999)), st.sets(st.integers(0, 4999)), st.integers(0, 4999))
def test_it_is_what_a_sorted_list_says(added: set[int], removed: set[int], asked: int) -> None:
    slots = SlotSet(5000)
    for slot in added:
        slots.add(slot)
    for slot in added & removed:
        slots.remove(slot)
    assert slots.last_up_to(asked) == max((slot for slot in added - removed if slot <= asked), default=None)
