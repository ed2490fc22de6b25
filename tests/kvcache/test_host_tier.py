"""The host tier: prefixes that come back after eviction, caches that come back after suspension."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import pytest
import torch

from kvferry.core import ConfigError, GroupKind, KVLayout
from kvferry.kvcache import CacheStateError, KVCache, KVCacheManager, OutOfBlocksError, create_manager
from kvferry.kvcache.groups import rules_of
from kvferry.kvcache.host_tier import HostTier, Shelf

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0, 1), 1, 2, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (2,), 1, 2, tokens_per_block=SIZE, window=6)
PROMPT = list(range(100, 122))  # five full blocks and a part
MakeTiered = Callable[..., KVCacheManager]


@pytest.fixture
def make_tiered(version: str, core: str) -> MakeTiered:
    def make(blocks: int, host_blocks: int, layouts: Sequence[KVLayout] = (FULL, WINDOW)) -> KVCacheManager:
        row_nbytes = sum(layout.slot_nbytes for layout in layouts)
        return create_manager(
            version, layouts, blocks * row_nbytes, core=core, debug=True, host_bytes=host_blocks * row_nbytes
        )

    return make


def fill(manager: KVCacheManager, tokens: list[int], scope: str = "") -> KVCache:
    """An open, committed cache; every token's entry is a function of the prefix that ends with it."""
    cache = manager.open(scope, tokens, max_reuse=len(tokens))
    cache.reserve(len(tokens))
    for group, pool in enumerate(manager.pools):
        table, first = cache.block_table(group), cache.first_block(group)
        for position in range(cache.history, len(tokens)):
            pool.view[table[position // SIZE - first], :, :, :, position % SIZE] = value(tokens[: position + 1])
    cache.advance(len(tokens))
    cache.commit(tokens)
    return cache


def value(prefix: list[int]) -> float:
    return float(zlib.crc32(repr(prefix).encode()) % (1 << 20))


def assert_written(manager: KVCacheManager, cache: KVCache, tokens: list[int]) -> None:
    """Every position below history that the cache still holds has its value."""
    for group, pool in enumerate(manager.pools):
        first = cache.first_block(group)
        held = pool.view[list(cache.block_table(group))][:, -1, -1, 0, :, 0].flatten().tolist()
        expected = [value(tokens[: position + 1]) for position in range(first * SIZE, cache.history)]
        assert held[: len(expected)] == expected, f"group {group}"


def test_what_eviction_pushed_out_is_found_again_with_its_bytes(make_tiered: MakeTiered) -> None:
    manager = make_tiered(6, host_blocks=12)
    fill(manager, PROMPT[:20]).close()
    fill(manager, list(range(24)), scope="x").close()
    assert manager.tier_counts()[0].kept >= 5

    assert manager.match("", PROMPT) == 20
    again = manager.open("", PROMPT, max_reuse=21)
    assert (again.reused, again.committed, again.history, again.capacity) == (20, 20, 20, 20)
    assert_written(manager, again, PROMPT)
    assert manager.statistics().restored_tokens == 20
    manager.check_integrity()
    again.close()
    assert manager.counts().free == manager.counts().total


def test_a_prefix_half_in_the_pool_and_half_below_is_whole(make_tiered: MakeTiered) -> None:
    manager = make_tiered(8, host_blocks=8, layouts=(FULL,))
    fill(manager, PROMPT[:20]).close()
    other = manager.open("x", [1], max_reuse=0)
    other.reserve(6 * SIZE)  # pushes the three deepest blocks out
    other.close()
    again = manager.open("", PROMPT, max_reuse=21)
    assert again.reused == 20
    assert_written(manager, again, PROMPT)


def test_v1_brings_up_as_many_blocks_as_there_are_pages_for() -> None:
    manager = create_manager("V1", [FULL], 7 * FULL.slot_nbytes, host_bytes=8 * FULL.slot_nbytes)
    fill(manager, PROMPT[:20]).close()
    other = manager.open("x", [1], max_reuse=0)
    other.reserve(4 * SIZE)  # pushes the two deepest blocks out and leaves no page free
    more = manager.open("y", [1], max_reuse=0)
    more.reserve(2 * SIZE)
    assert manager.match("", PROMPT) == 20
    more.close()
    other.close()
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(3 * SIZE)
    again = manager.open("", PROMPT, max_reuse=21)
    assert again.reused == 16
    assert manager.counts().free == 0
    assert_written(manager, again, PROMPT)
    manager.check_integrity()


def test_a_tier_without_room_forgets_the_deepest_blocks_first(make_tiered: MakeTiered) -> None:
    manager = make_tiered(5, host_blocks=3, layouts=(FULL,))
    fill(manager, PROMPT[:20]).close()
    fill(manager, list(range(20)), scope="x").close()
    assert manager.match("", PROMPT) == 12


def test_a_window_needs_only_its_last_blocks_below() -> None:
    rules = rules_of((FULL, WINDOW), SIZE)
    tier = HostTier((FULL, WINDOW), rules, 8 * (FULL.slot_nbytes + WINDOW.slot_nbytes))
    digests = [bytes([n]) * 32 for n in range(6)]
    rows = [torch.zeros((8, layout.slot_nbytes), dtype=torch.uint8) for layout in (FULL, WINDOW)]
    tier.shelves[0].keep({digest: n for n, digest in enumerate(digests)}, rows[0])
    assert tier.servable(0, digests) == 0
    tier.shelves[1].keep({digests[n]: n for n in (1, 2, 5)}, rows[1])
    # The window of 6 tokens needs two blocks: [1, 2] at block 3; [5] alone is not enough.
    assert tier.servable(0, digests) == 3
    assert tier.servable(1, digests[1:]) == 2
    assert tier.servable(5, digests[5:]) == 1, "the cache has the window's earlier block itself"
    tier.shelves[0].clear()
    assert tier.servable(5, digests[5:]) == 0


def test_suspend_gives_every_page_back_and_resume_brings_the_bytes_back(make_tiered: MakeTiered) -> None:
    manager = make_tiered(7, host_blocks=8)
    cache = fill(manager, PROMPT)
    assert cache.suspend()
    assert (cache.suspended, cache.history, cache.capacity) == (True, 22, 22)
    assert manager.counts().free == manager.counts().total
    assert list(cache.block_table(0)) == list(cache.block_table(1)) == []

    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(7 * SIZE)
    with pytest.raises(OutOfBlocksError, match=r"kv_cache\.bytes"):
        cache.resume(PROMPT)
    assert cache.suspended
    hog.close()
    cache.resume(PROMPT)
    assert (cache.committed, cache.history) == (20, 22)
    assert_written(manager, cache, PROMPT)
    assert manager.tier_counts()[0].parked == 0
    assert (manager.statistics().suspensions, manager.statistics().resumptions) == (1, 1)
    manager.check_integrity()
    cache.reserve(24)
    cache.advance(24)
    cache.commit([*PROMPT, 1, 2])
    assert manager.match("", [*PROMPT, 1, 2]) == 24, "it goes on where it was"


def test_what_the_pool_still_holds_is_shared_again(make_tiered: MakeTiered) -> None:
    manager = make_tiered(12, host_blocks=8, layouts=(FULL,))
    cache = fill(manager, PROMPT)
    other = fill(manager, PROMPT[:16])
    assert cache.suspend()
    cache.resume(PROMPT)
    assert list(cache.block_table(0))[:4] == list(other.block_table(0))
    assert_written(manager, cache, PROMPT)


def test_a_tier_without_room_refuses_and_nothing_changes(make_tiered: MakeTiered) -> None:
    manager = make_tiered(8, host_blocks=5)
    cache = fill(manager, PROMPT)
    tables = [list(cache.block_table(group)) for group in range(2)]
    assert not cache.suspend()
    assert [list(cache.block_table(group)) for group in range(2)] == tables
    assert manager.tier_counts()[0].free == manager.tier_counts()[0].total
    cache.reserve(24)


def test_parking_takes_the_place_of_kept_prefixes(make_tiered: MakeTiered) -> None:
    manager = make_tiered(6, host_blocks=6, layouts=(FULL,))
    fill(manager, [1] * 24, scope="old").close()
    cache = fill(manager, PROMPT)
    assert manager.tier_counts()[0].kept == 6
    assert cache.suspend()
    assert (manager.tier_counts()[0].kept, manager.tier_counts()[0].parked) == (0, 6)
    cache.close()
    assert manager.tier_counts()[0].free == 6
    manager.check_integrity()


def test_without_a_tier_nothing_can_be_suspended(version: str, core: str) -> None:
    manager = create_manager(version, [FULL], 8 * FULL.slot_nbytes, core=core)
    cache = fill(manager, PROMPT)
    assert not cache.suspend()
    assert not cache.suspended
    with pytest.raises(CacheStateError, match="resume: the cache is open"):
        cache.resume(PROMPT)
    assert manager.tier_counts() == ()


def test_resume_needs_the_committed_tokens(make_tiered: MakeTiered) -> None:
    cache = fill(make_tiered(8, host_blocks=8), PROMPT)
    cache.suspend()
    with pytest.raises(CacheStateError, match="19 token ids for 20"):
        cache.resume(PROMPT[:19])
    assert cache.suspended


def test_a_host_tier_below_one_block_is_refused(version: str, core: str) -> None:
    with pytest.raises(ConfigError, match="at least") as caught:
        create_manager(version, [FULL], 8 * FULL.slot_nbytes, core=core, host_bytes=1)
    assert caught.value.field == "kv_cache.host_bytes"


def test_a_slot_filled_and_given_up_in_one_go_holds_the_newest() -> None:
    shelf = Shelf(FULL, 2)
    rows = torch.arange(3, dtype=torch.uint8).view(3, 1).expand(3, FULL.slot_nbytes)
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    shelf.keep({a: 0, b: 1, c: 2}, rows)
    assert not shelf.anywhere(a)
    for digest, expected in ((b, 1), (c, 2)):
        (slot,) = shelf.lend([digest])
        assert shelf.rows[slot].tolist() == [expected] * FULL.slot_nbytes
        shelf.end_loan([digest], [slot])
    shelf.check_integrity(())


def test_what_is_lent_is_not_given_up() -> None:
    shelf = Shelf(FULL, 2)
    rows = torch.zeros((4, FULL.slot_nbytes), dtype=torch.uint8)
    digests = [bytes([n]) * 32 for n in range(4)]
    shelf.keep({digests[0]: 0, digests[1]: 1}, rows)
    slots = shelf.lend(digests[:2])
    shelf.keep({digests[2]: 2}, rows)
    assert not shelf.in_memory(digests[2])
    shelf.end_loan(digests[:2], slots)
    shelf.keep({digests[2]: 2}, rows)
    assert [shelf.in_memory(digest) for digest in digests[:3]] == [True, False, True]
