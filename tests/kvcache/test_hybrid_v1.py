"""Manager V1 with recurrent states: one per request, no snapshots, nothing reused."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core import ConfigError, GroupKind, KVLayout
from kvferry.kvcache import CacheStateError, KVCacheManager, OutOfBlocksError, create_manager
from kvferry.kvcache.manager_v1 import ManagerV1
from kvferry.kvcache.pool import blocks_for_budget, slot_counts

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=SIZE)
CONV = KVLayout(GroupKind.CONV, (1, 2), 1, 3, tokens_per_block=1, planes=1)
WINDOW = KVLayout(GroupKind.WINDOW, (3,), 1, 2, tokens_per_block=SIZE, window=6)
SSM = KVLayout(GroupKind.SSM, (1, 2), 2, 5, tokens_per_block=1, planes=1)
LAYOUTS = (CONV, FULL, SSM, WINDOW)
PROMPT = list(range(100, 120))


def nbytes_of(blocks: int) -> int:
    return sum(slots * layout.slot_nbytes for slots, layout in zip(slot_counts(LAYOUTS, blocks), LAYOUTS, strict=True))


def make(blocks: int = 32, **options: Any) -> KVCacheManager:
    """Two states at 32 blocks."""
    options = {"prefix_reuse": False, "debug": True, **options}
    return create_manager("V1", LAYOUTS, nbytes_of(blocks), **options)


def test_pools_stand_in_the_order_of_the_layouts_and_share_the_budget() -> None:
    manager = make(40)
    assert [pool.layout for pool in manager.pools] == list(LAYOUTS)
    assert [pool.num_blocks for pool in manager.pools] == [3, 40, 3, 40]
    assert sum(pool.region.nbytes for pool in manager.pools) == nbytes_of(40)
    assert manager.counts().total == manager.counts().free == 2 * 40 + 2 * 3
    assert blocks_for_budget(LAYOUTS, nbytes_of(40)) == 40
    assert (manager.version, manager.core, manager.takes_snapshots) == ("V1", "python", False)


def test_a_request_has_one_state_of_zeros_from_its_first_reservation_on() -> None:
    manager = make()
    cache = manager.open("", PROMPT, max_reuse=19)
    assert [len(cache.block_table(group)) for group in range(4)] == [0, 0, 0, 0]
    for stop in (1, 9, 20):
        cache.reserve(stop)
        assert [len(cache.block_table(group)) for group in range(4)] == [1, -(-stop // 4), 1, -(-stop // 4)]
    assert list(cache.block_table(0)) == list(cache.block_table(2)), "one id in every pool"
    for group in (0, 2):
        assert not manager.pools[group].view[list(cache.block_table(group))].any()
    cache.advance(20)
    cache.commit(PROMPT)
    assert not cache.snapshot()
    assert manager.match("", PROMPT) == 0
    manager.check_integrity()
    cache.close()
    assert manager.counts().free == manager.counts().total


def test_no_room_for_a_state_changes_nothing() -> None:
    manager = make()
    caches = [manager.open("", PROMPT, max_reuse=0) for _ in range(3)]
    for cache in caches[:2]:
        assert manager.can_reserve(20)
        cache.reserve(4)
    before = manager.counts()
    assert not manager.can_reserve(1)
    assert manager.can_reserve(0)
    with pytest.raises(OutOfBlocksError, match=r"1 more states are needed, 0 of 2 are free.*kv_cache\.bytes"):
        caches[2].reserve(4)
    assert manager.counts() == before
    assert (caches[2].capacity, len(caches[2].block_table(1))) == (0, 0)
    assert manager.statistics().refused_reservations == 1
    caches[0].close()
    caches[2].reserve(4)
    manager.check_integrity()


def test_no_room_for_blocks_takes_no_state() -> None:
    manager = make(3)
    cache = manager.open("", PROMPT, max_reuse=0)
    with pytest.raises(OutOfBlocksError):
        cache.reserve(20)
    assert manager.counts().free == manager.counts().total
    assert len(cache.block_table(0)) == 0


def test_a_pin_outlives_the_request_and_keeps_its_state() -> None:
    manager = make()
    cache = manager.open("", PROMPT, max_reuse=0)
    cache.reserve(6)
    cache.advance(6)
    (slot,) = cache.block_table(0)
    hold = cache.pin()
    assert [table.block_ids for table in hold.tables] == [tuple(cache.block_table(group)) for group in range(4)]
    for table, pool in zip(hold.tables, manager.pools, strict=True):
        assert list(table.generations) == pool.generations[list(table.block_ids)].tolist()
    cache.close()
    assert manager.counts().pinned == 2 * 2 + 2
    other = manager.open("", PROMPT, max_reuse=0)
    other.reserve(4)
    assert slot not in other.block_table(0)
    hold.release()
    assert manager.counts().pinned == 0
    with pytest.raises(CacheStateError):
        hold.release()


def test_quarantine_keeps_the_state_from_everybody() -> None:
    manager = make()
    cache = manager.open("", PROMPT, max_reuse=0)
    cache.reserve(6)
    hold = cache.quarantine()
    assert manager.counts().quarantined == 2 * 2 + 2
    manager.check_integrity()
    hold.release()
    assert manager.counts().free == manager.counts().total
    with pytest.raises(CacheStateError):
        cache.reserve(1)


def test_a_quota_counts_states_too_and_is_refused_as_a_whole() -> None:
    manager = make(64)  # four states
    caches = [manager.open("", PROMPT, max_reuse=0) for _ in range(3)]
    for cache in caches:
        cache.reserve(4)
    before = manager.counts()
    with pytest.raises(OutOfBlocksError, match="2 more states"):
        manager.resize(nbytes_of(32))
    assert manager.counts() == before
    caches.pop().close()
    manager.resize(nbytes_of(32))
    assert manager.counts().total == 2 * 32 + 2 * 2
    assert manager.max_tokens() == 32 * SIZE
    manager.check_integrity()
    manager.resize(nbytes_of(64))
    assert manager.counts().total == 2 * 64 + 2 * 4
    with pytest.raises(ConfigError):
        manager.resize(nbytes_of(65))


@pytest.mark.parametrize(
    "option", [{"prefix_reuse": True}, {"host_bytes": 4096}, {"disk_bytes": 4096}, {"connector": object()}]
)
def test_what_would_need_snapshots_is_refused_by_name(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match="manager V1 keeps one state per request") as caught:
        make(**option)
    assert caught.value.field == f"kv_cache.{name}"


def test_it_cannot_be_suspended() -> None:
    cache = make().open("", PROMPT, max_reuse=0)
    cache.reserve(4)
    assert not cache.suspend()
    assert not cache.suspended
    with pytest.raises(CacheStateError):
        cache.resume(PROMPT)


def test_without_states_v1_is_v1() -> None:
    assert isinstance(create_manager("V1", (FULL, WINDOW), 1 << 12), ManagerV1)
