"""Which slabs nobody holds a slot of, and in which order they change hands."""

from __future__ import annotations

from kvferry.kvcache.slabs import SlabIndex


def test_a_slab_is_idle_while_nobody_holds_any_of_its_slots() -> None:
    slabs = SlabIndex(8, 2)
    assert slabs.first(9) == [(False, 0), (False, 1), (False, 2), (False, 3)]
    slabs.take(0)
    slabs.take(1)
    slabs.take(5)
    assert (len(slabs), slabs.first(9)) == (2, [(False, 1), (False, 3)])
    slabs.free(0)
    assert len(slabs) == 2, "slot 1 is busy still"
    slabs.free(1)
    assert slabs.first(2) == [(False, 1), (False, 3)]
    assert slabs.first(9) == [(False, 1), (False, 3), (False, 0)]
    slabs.check_integrity({5}, set())


def test_empty_slabs_go_first_then_low_priorities_then_those_idle_for_longest() -> None:
    slabs = SlabIndex(8, 2)
    for slot in (0, 1, 2, 3, 4, 5):
        slabs.take(slot)
    slabs.cache(4, 1)
    slabs.cache(0, 0)
    slabs.cache(5, 0)  # its neighbour's priority is 1
    slabs.free(1)
    slabs.cache(2, 0)
    slabs.cache(3, 0)
    assert slabs.first(9) == [(False, 3), (True, 0), (True, 1), (True, 2)]
    slabs.check_integrity(set(), {0, 2, 3, 4, 5})
    slabs.evict(0)
    assert slabs.first(9) == [(False, 3), (False, 0), (True, 1), (True, 2)]
    slabs.hold(4)
    slabs.evict(5)
    assert slabs.first(9) == [(False, 3), (False, 0), (True, 1)]
    slabs.cache(4, -1)
    assert slabs.first(9)[2:] == [(True, 2), (True, 1)], "what was cached there before counts no more"
