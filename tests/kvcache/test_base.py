"""What the interface promises, case by case, of every manager."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.core import ConfigError
from kvferry.kvcache import CacheStateError, KVCache, KVCacheManager, OutOfBlocksError

MakeManager = Callable[..., KVCacheManager]
Serve = Callable[..., KVCache]
PROMPT = list(range(100, 118))  # 18 tokens: four full blocks of 4 and a part


def test_a_closed_cache_is_found_again_and_one_token_is_left_to_compute(
    make_manager: MakeManager, serve: Serve
) -> None:
    manager = make_manager(16)
    first = serve(manager, PROMPT)
    blocks = list(first.block_table(0))
    first.close()

    assert manager.match("", PROMPT) == 16
    again = manager.open("", PROMPT[:16], max_reuse=15)
    assert (again.reused, again.committed, again.history, again.capacity) == (12, 12, 12, 12)
    assert list(again.block_table(0)) == blocks[:3]


def test_a_receiver_may_reuse_the_whole_prompt(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16)
    serve(manager, PROMPT[:16]).close()
    assert manager.open("", PROMPT[:16], max_reuse=16).history == 16


def test_max_reuse_zero_reuses_nothing_and_below_zero_is_refused(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16)
    serve(manager, PROMPT).close()
    assert manager.open("", PROMPT, max_reuse=0).reused == 0
    with pytest.raises(CacheStateError, match="max_reuse"):
        manager.open("", PROMPT, max_reuse=-1)


def test_scopes_never_match_each_other(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16)
    serve(manager, PROMPT, scope="adapter-a").close()
    assert manager.match("adapter-a", PROMPT) == 16
    assert manager.match("adapter-b", PROMPT) == 0
    assert manager.match("", PROMPT) == 0
    assert manager.open("", PROMPT, max_reuse=17).reused == 0


def test_a_fork_shares_blocks_up_to_the_first_difference(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16)
    first = serve(manager, PROMPT)
    second = serve(manager, [*PROMPT[:9], 7, 7, 7, 7, 7, 7, 7])
    assert second.reused == 8
    assert list(second.block_table(0))[:2] == list(first.block_table(0))[:2]
    assert not set(second.block_table(0)[2:]) & set(first.block_table(0))


def test_the_same_prompt_computed_twice_is_kept_once(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16)
    first = serve(manager, PROMPT, reuse=0)
    second = serve(manager, PROMPT, reuse=0)
    assert list(second.block_table(0))[:4] == list(first.block_table(0))[:4]
    assert second.block_table(0)[4] != first.block_table(0)[4]
    assert manager.counts().free == manager.counts().total - 6
    manager.check_integrity()


def test_a_pin_made_before_the_swap_keeps_its_own_blocks(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16)
    serve(manager, PROMPT)
    second = manager.open("", PROMPT, max_reuse=0)
    second.reserve(18)
    second.advance(18)
    own = tuple(second.block_table(0))
    hold = second.pin()
    second.commit(PROMPT)
    second.close()

    assert hold.tables[0].block_ids == own
    assert manager.counts().pinned == 5
    assert manager.counts().free == 16 - 5 - 5
    hold.release()
    assert manager.counts().free == 16 - 5
    manager.check_integrity()


def test_a_block_that_only_a_pin_keeps_does_not_hold_up_the_eviction_of_those_before_it(
    make_manager: MakeManager, serve: Serve
) -> None:
    manager = make_manager(6)
    other = serve(manager, PROMPT[:4])
    pinned = manager.open("", PROMPT, max_reuse=0)
    pinned.reserve(8)
    pinned.advance(8)
    hold = pinned.pin()
    pinned.commit(PROMPT[:8])  # block 0 is swapped for the one of `other`, block 1 is published behind it
    pinned.close()
    other.close()
    assert manager.match("", PROMPT) == 8
    assert manager.counts().free == 4

    big = manager.open("x", [1], max_reuse=0)
    big.reserve(16)
    assert manager.match("", PROMPT) == 0
    manager.check_integrity()
    hold.release()
    big.close()
    manager.check_integrity()
    assert manager.counts().free == 6


def test_pinned_bytes_and_generations_outlive_the_cache(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8)
    cache = serve(manager, PROMPT)
    pool = manager.pools[0]
    pool.view[list(cache.block_table(0))] = 3.0
    hold = cache.pin()
    cache.close()
    table = hold.tables[0]
    assert manager.counts().pinned == 5

    other = manager.open("", [1], max_reuse=0)
    other.reserve(12)
    pool.view[list(other.block_table(0))] = 9.0
    with pytest.raises(OutOfBlocksError):
        other.reserve(13)
    assert bool((pool.view[list(table.block_ids)] == 3.0).all())
    assert pool.generations[list(table.block_ids)].tolist() == list(table.generations)

    hold.release()
    other.reserve(32)
    assert set(other.block_table(0)) >= set(table.block_ids)
    for slot, generation in zip(table.block_ids, table.generations, strict=True):
        assert int(pool.generations[slot]) > generation


def test_a_pin_covers_history_and_not_the_reserve(make_manager: MakeManager) -> None:
    manager = make_manager(8)
    cache = manager.open("", PROMPT, max_reuse=0)
    cache.reserve(20)
    assert cache.pin().tables[0].block_ids == ()
    cache.advance(5)
    assert cache.pin().tables[0].block_ids == tuple(cache.block_table(0)[:2])


def test_quarantine_keeps_uncommitted_blocks_from_everybody(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8)
    serve(manager, PROMPT[:8]).close()
    loading = manager.open("", PROMPT, max_reuse=16)
    loading.reserve(18)
    pages = list(loading.block_table(0))
    hold = loading.quarantine()
    assert hold.tables[0].block_ids == tuple(pages[2:])
    assert hold.tables[0].first_block == 2
    assert (manager.counts().quarantined, manager.counts().free) == (3, 5)
    assert manager.match("", PROMPT) == 8, "the published part stays findable"

    other = manager.open("", [1], max_reuse=0)
    other.reserve(20)
    assert not set(other.block_table(0)) & set(pages[2:])
    with pytest.raises(OutOfBlocksError):
        other.reserve(21)
    hold.release()
    other.reserve(32)
    with pytest.raises(CacheStateError):
        hold.release()


@pytest.mark.parametrize("end", ["close", "quarantine"])
def test_a_closed_cache_refuses_everything(make_manager: MakeManager, end: str) -> None:
    manager = make_manager(8)
    cache = manager.open("", PROMPT, max_reuse=0)
    cache.reserve(8)
    getattr(cache, end)()
    counts = manager.counts()
    calls: list[Callable[[], object]] = [
        cache.close,
        cache.quarantine,
        cache.pin,
        lambda: cache.reserve(20),
        lambda: cache.advance(4),
        lambda: cache.commit(PROMPT),
    ]
    for call in calls:
        with pytest.raises(CacheStateError, match="closed"):
            call()
    assert manager.counts() == counts
    assert list(cache.block_table(0)) == []


def test_lengths_that_would_fall_or_cross_are_refused(make_manager: MakeManager, serve: Serve) -> None:
    cache = serve(make_manager(8), PROMPT)
    with pytest.raises(CacheStateError, match="reserve"):
        cache.reserve(17)
    with pytest.raises(CacheStateError, match="advance"):
        cache.advance(17)
    with pytest.raises(CacheStateError, match="advance"):
        cache.advance(19)
    with pytest.raises(CacheStateError, match="commit"):
        cache.commit(PROMPT[:15])
    assert (cache.committed, cache.history, cache.capacity) == (16, 18, 18)
    cache.reserve(18)
    assert cache.capacity == 18


def test_running_out_of_blocks_changes_nothing_and_names_the_setting(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8, window=6)
    serve(manager, PROMPT).close()
    cache = manager.open("", PROMPT[:4], max_reuse=4)
    tables = [list(cache.block_table(group)) for group in range(2)]
    counts = manager.counts()
    with pytest.raises(OutOfBlocksError, match=r"kv_cache\.bytes"):
        cache.reserve(33)
    assert cache.capacity == 4
    assert [list(cache.block_table(group)) for group in range(2)] == tables
    assert manager.counts() == counts
    assert manager.match("", PROMPT) == 16, "nothing was evicted for a reservation that could not be had"


def test_free_counts_what_a_new_request_could_get(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8)
    live = serve(manager, PROMPT[:8])
    serve(manager, [1, 2, 3, 4, 5, 6]).close()
    counts = manager.counts()
    assert (counts.total, counts.free, counts.cached) == (8, 6, 1)
    assert manager.can_reserve(24)
    assert not manager.can_reserve(25)
    assert manager.max_tokens() == 32
    fresh = manager.open("", [9], max_reuse=0)
    fresh.reserve(24)
    fresh.close()
    live.close()
    assert manager.counts().free == 8


def test_clear_reuse_forgets_what_no_live_cache_uses(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16)
    live = serve(manager, PROMPT[:8])
    serve(manager, PROMPT).close()
    manager.clear_reuse()
    assert manager.match("", PROMPT) == 8
    assert manager.counts().cached == 0
    live.close()
    manager.clear_reuse()
    assert manager.match("", PROMPT) == 0
    assert manager.counts().free == 16


def test_a_long_request_gets_neighbouring_blocks(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(32)
    caches = [serve(manager, [n] * 7) for n in range(8)]
    for cache in caches[1::2]:
        cache.close()
    long = manager.open("", [99], max_reuse=0)
    long.reserve(40)
    table = list(long.block_table(0))
    assert table == list(range(table[0], table[0] + 10))
    long.reserve(44)
    assert long.block_table(0)[-1] == table[-1] + 1


def test_lower_priority_is_evicted_first(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8)
    serve(manager, [1] * 8, priority=1).close()
    serve(manager, [2] * 8).close()
    serve(manager, [3] * 8).close()
    taker = manager.open("", [9], max_reuse=0)
    taker.reserve(24)
    assert [manager.match("", [n] * 8) for n in (1, 2, 3)] == [8, 0, 0]


def test_publishing_what_is_there_already_raises_its_priority(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8)
    first = serve(manager, [1] * 8)
    serve(manager, [1] * 8, reuse=0, priority=1).close()
    first.close()
    serve(manager, [2] * 8).close()
    taker = manager.open("", [9], max_reuse=0)
    taker.reserve(24)
    assert [manager.match("", [n] * 8) for n in (1, 2)] == [8, 0]
    manager.check_integrity()


def test_reuse_can_be_switched_off(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8, window=6, reuse=False)
    cache = serve(manager, PROMPT)
    assert cache.committed == 0
    hold = cache.quarantine()
    assert manager.counts().quarantined > 0
    hold.release()
    assert manager.match("", PROMPT) == 0
    assert (manager.counts().free, manager.counts().cached) == (16, 0)
    manager.check_integrity()


def test_the_quota_shrinks_and_grows_while_serving(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(16, window=6)
    row_nbytes = sum(pool.layout.slot_nbytes for pool in manager.pools)
    serve(manager, PROMPT).close()
    live = serve(manager, [7] * 8)
    manager.resize(4 * row_nbytes)
    assert (manager.counts().total, manager.max_tokens()) == (8, 16)
    assert manager.can_reserve(8)
    assert not manager.can_reserve(9)
    live.reserve(16)
    with pytest.raises(OutOfBlocksError):
        live.reserve(17)
    manager.check_integrity()
    manager.resize(16 * row_nbytes)
    assert manager.counts().total == 32
    live.reserve(64)
    live.close()
    assert manager.counts().free == 32
    manager.check_integrity()


def test_a_quota_below_what_is_in_use_is_refused_and_nothing_changes(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8)
    nbytes = manager.pools[0].layout.slot_nbytes
    manager.resize(7 * nbytes)
    serve(manager, [7] * 16)
    serve(manager, PROMPT[:4]).close()
    counts = manager.counts()
    with pytest.raises(OutOfBlocksError) as caught:
        manager.resize(3 * nbytes)
    assert caught.value.field == "kv_cache.bytes"
    assert manager.counts() == counts
    assert manager.match("", PROMPT) == 4
    for impossible in (9 * nbytes, nbytes - 1):
        with pytest.raises(ConfigError, match=r"kv_cache\.bytes"):
            manager.resize(impossible)
    manager.resize(4 * nbytes)
    assert manager.match("", PROMPT) == 0
    assert manager.counts().free == 0


def test_statistics_count_what_was_asked_for_and_found(make_manager: MakeManager, serve: Serve) -> None:
    manager = make_manager(8)
    first = serve(manager, PROMPT)
    second = serve(manager, PROMPT)
    with pytest.raises(OutOfBlocksError):
        second.reserve(36)
    first.suspend()
    found = manager.statistics()
    assert (found.opened, found.prompt_tokens, found.reused_tokens, found.restored_tokens) == (2, 36, 16, 0)
    assert (found.refused_reservations, found.suspensions, found.resumptions) == (1, 0, 0)
    manager.open("", PROMPT, max_reuse=17)
    assert found.opened == 2, "a copy"
