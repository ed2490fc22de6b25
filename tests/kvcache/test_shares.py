"""Layer groups that share one buffer, and shares that change hands."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvferry.core import ConfigError, GroupKind, KVLayout
from kvferry.kvcache import KVCache, KVCacheManager, OutOfBlocksError, create_manager
from kvferry.kvcache.shares import divide, shareable, slab_nbytes

MakeShared = Callable[..., KVCacheManager]
Serve = Callable[..., KVCache]
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=4)
WINDOW = KVLayout(GroupKind.WINDOW, (1, 2), 1, 1, tokens_per_block=4, window=8)
SLAB = WINDOW.slot_nbytes  # two full blocks, or one of the window


@pytest.fixture(params=["cpp", "python"])
def make_shared(request: pytest.FixtureRequest) -> MakeShared:
    """make_shared(slabs, typical): steps of four tokens; a request's window is four blocks at most."""

    def make(slabs: int, typical: int = 64, **options: object) -> KVCacheManager:
        return create_manager(
            "V2",
            (FULL, WINDOW),
            slabs * SLAB + 5,
            core=request.param,
            typical_tokens=typical,
            step_tokens=4,
            **options,  # type: ignore[arg-type]
        )

    return make


def totals(manager: KVCacheManager) -> list[int]:
    return [counts.total for counts in manager.group_counts()]


def test_the_first_division_is_by_what_a_typical_request_holds(make_shared: MakeShared) -> None:
    # 64 tokens: 16 full blocks in 8 slabs, a window of ceil((8 + 4) / 4) + 1 = 4 blocks in 4; of 28 slabs two each are
    # given, the other 24 divided 8 : 4.
    assert totals(make_shared(28)) == [2 * (2 + 16), 2 + 8]
    # As short as the window: 4 blocks of each.
    assert totals(make_shared(28, typical=16)) == [2 * (2 + 8), 2 + 16]


def test_groups_share_the_bytes_of_the_budget_and_not_one_more(make_shared: MakeShared) -> None:
    manager = make_shared(28)
    full, window = manager.pools
    assert full.region.addr == window.region.addr
    assert full.region.nbytes == window.region.nbytes == 28 * SLAB
    live = [manager.open(str(n), [1], max_reuse=0) for n in range(3)]
    for cache in live:
        cache.reserve(16)
    taken = [
        (pool.region.addr + slot * pool.layout.slot_nbytes, pool.layout.slot_nbytes)
        for cache in live
        for group, pool in enumerate(manager.pools)
        for slot in cache.block_table(group)
    ]
    taken.sort()
    assert len(taken) == 24
    assert all(addr + nbytes <= behind for (addr, nbytes), (behind, _) in itertools.pairwise(taken))


def test_a_group_that_is_short_gets_what_another_does_not_use(make_shared: MakeShared) -> None:
    manager = make_shared(12, typical=16)
    assert totals(manager) == [2 * 5, 7]
    long = manager.open("", [1], max_reuse=0)
    long.reserve(4 * 16, ahead=4)  # 16 full blocks in 8 slabs; the window keeps 4
    assert totals(manager) == [16, 4]
    assert manager.counts().free == 0 + 3
    with pytest.raises(OutOfBlocksError, match="layer group 0"):
        long.reserve(4 * 23, ahead=4)
    assert totals(manager) == [16, 4], "refused, and nothing has changed"
    long.close()
    short = [manager.open(str(n), [1], max_reuse=0) for n in range(8)]
    for cache in short:
        cache.reserve(4)
    assert totals(manager)[1] >= 8, "and back again"
    manager.check_integrity()


def test_a_slab_in_use_never_changes_hands(make_shared: MakeShared) -> None:
    manager = make_shared(8, typical=16)
    caches = [manager.open(str(n), [1], max_reuse=0) for n in range(totals(manager)[1])]
    for cache in caches:
        cache.reserve(4)
    for cache in caches[1:]:
        cache.close()
    held = caches[0].block_table(1)[0]
    manager.pools[1].view[held] = 7.0
    long = manager.open("", [1], max_reuse=0)
    long.reserve(manager.max_tokens() - 8 * 4, ahead=4)
    for slot in long.block_table(0):
        manager.pools[0].view[slot] = 9.0
    assert bool((manager.pools[1].view[held] == 7.0).all())
    manager.check_integrity()


def test_what_is_cached_gives_way_last(make_shared: MakeShared, serve: Serve) -> None:
    manager = make_shared(12, typical=16)
    serve(manager, list(range(16)))
    assert manager.group_counts()[1].cached == 2, "of a live cache, stale"
    long = manager.open("x", [1], max_reuse=0)
    long.reserve(4 * 10, ahead=4)
    assert totals(manager) == [14, 5]
    assert manager.group_counts()[1].cached == 2, "free slabs went first"
    long.reserve(4 * 13, ahead=4)
    assert totals(manager) == [18, 3]
    assert manager.group_counts()[1].cached == 0
    manager.check_integrity()


def test_a_reader_of_what_changed_hands_is_told(make_shared: MakeShared) -> None:
    manager = make_shared(12, typical=16)
    before = manager.pools[1].generations.clone()
    long = manager.open("", [1], max_reuse=0)
    long.reserve(4 * 16, ahead=4)
    assert int((manager.pools[1].generations > before).sum()) >= 3


def test_the_longest_request_is_what_fits_beside_its_window(make_shared: MakeShared) -> None:
    manager = make_shared(12)
    # four slabs of window, the other eight hold 16 full blocks
    assert manager.max_tokens() == 64
    cache = manager.open("", [1], max_reuse=0)
    assert manager.can_reserve(64, ahead=4)
    assert not manager.can_reserve(89, ahead=4), "twelve slabs for the full blocks, and none left for the window"
    assert not manager.can_reserve(64), "all of the window at once is more"
    cache.reserve(64, ahead=4)
    for history in range(4, 65, 4):
        cache.reserve(history)
        cache.advance(history)
        cache.commit(list(range(history)))
    assert len(cache.block_table(1)) <= 4
    manager.check_integrity()


def test_a_receiver_holds_the_window_only(make_shared: MakeShared) -> None:
    manager = make_shared(28)
    cache = manager.open("", list(range(61)), max_reuse=0)
    cache.reserve(61, loaded=60)
    assert (cache.first_block(0), len(cache.block_table(0))) == (0, 16)
    # The token at 60 looks back to 53, in block 13.
    assert (cache.first_block(1), len(cache.block_table(1))) == (13, 3)
    manager.check_integrity()
    cache.advance(60)
    cache.commit(list(range(60)))
    assert manager.match("", list(range(60))) == 60
    assert manager.match("", list(range(56))) == 0
    manager.check_integrity()


def test_a_quota_retires_slabs_and_gives_them_back(make_shared: MakeShared) -> None:
    manager = make_shared(12)
    start = totals(manager)
    manager.resize(6 * SLAB)
    assert sum(total // per for total, per in zip(totals(manager), (2, 1), strict=True)) == 6
    cache = manager.open("", [1], max_reuse=0)
    cache.reserve(16)
    with pytest.raises(OutOfBlocksError):
        manager.resize(4 * SLAB)
    with pytest.raises(ConfigError, match="need 4"):
        manager.resize(3 * SLAB)
    with pytest.raises(ConfigError, match="share 12"):
        manager.resize(13 * SLAB)
    cache.close()
    manager.resize(12 * SLAB)
    assert sum(total // per for total, per in zip(totals(manager), (2, 1), strict=True)) == 12
    assert sum(start) > 0
    manager.check_integrity()


def test_who_shares() -> None:
    from kvferry.kvcache.groups import rules_of

    state = KVLayout(GroupKind.SSM, (3,), 1, 1, tokens_per_block=1, planes=1)
    assert slab_nbytes((FULL, WINDOW)) == SLAB
    assert shareable((FULL, WINDOW), rules_of((FULL, WINDOW), 4), 8 * SLAB)
    assert not shareable((FULL, WINDOW), rules_of((FULL, WINDOW), 4), 7 * SLAB)
    for layouts in ((FULL,), (WINDOW,), (FULL, WINDOW, state)):
        assert not shareable(layouts, rules_of(layouts, 4), 1 << 20)


@pytest.mark.parametrize(
    ("slabs", "weights", "expected"), [(10, [1, 1], [5, 5]), (11, [2, 1], [7, 4]), (4, [9, 1], [2, 2])]
)
def test_slabs_are_divided_by_weight(slabs: int, weights: list[float], expected: list[int]) -> None:
    assert divide(slabs, weights) == expected
