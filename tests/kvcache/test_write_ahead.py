"""Blocks that eviction would come to next are copied down before it does."""

from __future__ import annotations

import pytest
from manual_copier import ManualCopier

from kvferry.core import GroupKind, KVLayout, Tier
from kvferry.kvcache import KVCache, KVCacheManager, create_manager, write_ahead

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=SIZE)
PROMPT = list(range(100, 116))


@pytest.fixture(params=["cpp", "python"])
def core(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def make(copier: ManualCopier, core: str, blocks: int = 16, host_blocks: int = 16) -> KVCacheManager:
    return create_manager(
        "V2",
        [FULL],
        blocks * FULL.slot_nbytes,
        core=core,
        debug=True,
        host_bytes=host_blocks * FULL.slot_nbytes,
        event_capacity=100,
        copier=copier,
    )


def fill(manager: KVCacheManager, tokens: list[int], scope: str = "") -> KVCache:
    cache = manager.open(scope, tokens, max_reuse=len(tokens))
    cache.reserve(len(tokens))
    (pool,), table = manager.pools, cache.block_table(0)
    for position in range(cache.history, len(tokens)):
        pool.view[table[position // SIZE], :, :, :, position % SIZE] = float(tokens[position])
    cache.advance(len(tokens))
    cache.commit(tokens)
    return cache


def values(manager: KVCacheManager, cache: KVCache) -> list[float]:
    held: list[float] = manager.pools[0].view[list(cache.block_table(0))][:, -1, -1, 0, :, 0].flatten().tolist()
    return held


def copied_at(manager: KVCacheManager) -> tuple[int, int]:
    counted = manager.statistics()
    return counted.copied_ahead, counted.copied_at_once


def finish(manager: KVCacheManager, copier: ManualCopier) -> None:
    while manager.poll():
        for copy in copier.waiting[::-1]:
            copy.make()


def test_nothing_is_copied_while_enough_is_free(core: str) -> None:
    copier = ManualCopier()
    manager = make(copier, core)
    fill(manager, PROMPT).close()
    assert not manager.poll()
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(10 * SIZE)  # two of sixteen are left, an eighth
    assert not manager.poll()
    hog.reserve(11 * SIZE)
    assert manager.poll()
    # The deepest block goes first, and is the only one an eviction could come to that finds nothing free.
    assert [copy.sources for pending in copier.waiting for copy in pending.copies] == [[3]]


def test_eviction_of_what_was_written_ahead_copies_nothing(core: str) -> None:
    copier = ManualCopier()
    manager = make(copier, core)
    assert manager.events is not None
    fill(manager, PROMPT).close()
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(12 * SIZE)
    assert manager.events.held(Tier.HOST) == set()
    finish(manager, copier)
    assert len(manager.events.held(Tier.HOST)) == 2
    assert manager.tier_counts()[0].kept == 2
    hog.reserve(14 * SIZE)
    assert copied_at(manager) == (2, 0)
    hog.close()
    again = manager.open("", PROMPT, max_reuse=16)
    assert again.reused == 16
    assert values(manager, again) == [float(token) for token in PROMPT]
    manager.check_integrity()


def test_a_copy_that_comes_too_late_is_void(core: str) -> None:
    """Its slot gets another owner while it is copied: the block is copied at once, and what arrives is not it."""
    copier = ManualCopier()
    manager = make(copier, core)
    fill(manager, PROMPT).close()
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(12 * SIZE)
    manager.poll()
    (late,) = copier.waiting
    hog.reserve(16 * SIZE)
    assert copied_at(manager) == (0, 4)
    assert (manager.tier_counts()[0].kept, manager.tier_counts()[0].free) == (4 + 2, 10), "the late copy still writes"
    late.make()  # reads what the new owner has: NaN
    manager.poll()
    assert (manager.tier_counts()[0].kept, manager.tier_counts()[0].free) == (4, 12)
    hog.close()
    again = manager.open("", PROMPT, max_reuse=16)
    assert values(manager, again) == [float(token) for token in PROMPT]
    manager.check_integrity()


def test_what_is_forgotten_while_it_is_copied_is_not_there_afterwards(core: str) -> None:
    copier = ManualCopier()
    manager = make(copier, core)
    fill(manager, PROMPT).close()
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(12 * SIZE)
    manager.poll()
    manager.clear_reuse()
    finish(manager, copier)
    assert manager.match("", PROMPT) == 0
    assert manager.tier_counts()[0].free == 16
    manager.check_integrity()


def test_a_block_used_again_while_it_is_copied_is_in_both(core: str) -> None:
    copier = ManualCopier()
    manager = make(copier, core)
    fill(manager, PROMPT).close()
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(12 * SIZE)
    manager.poll()
    again = manager.open("", PROMPT, max_reuse=16)
    finish(manager, copier)
    assert manager.tier_counts()[0].kept == 2
    assert values(manager, again) == [float(token) for token in PROMPT]
    again.close()
    manager.check_integrity()


def test_so_many_bytes_are_copied_at_a_time(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead, "MAX_NBYTES", 3 * FULL.slot_nbytes)
    copier = ManualCopier()
    manager = make(copier, core, blocks=64, host_blocks=64)
    fill(manager, list(range(64 * SIZE))).close()
    sizes = []
    while manager.poll():
        sizes.append([len(copy.to) for pending in copier.waiting for copy in pending.copies])
        for copy in copier.waiting[::-1]:
            copy.make()
    assert sizes == [[3], [3], [2], []]
    assert manager.tier_counts()[0].kept == 8, "an eighth of the pool"
    assert not manager.poll()


def test_at_most_half_of_the_tier_is_for_what_the_pool_has_too(core: str) -> None:
    copier = ManualCopier()
    manager = make(copier, core, blocks=64, host_blocks=6)
    fill(manager, list(range(64 * SIZE))).close()
    finish(manager, copier)
    assert manager.tier_counts()[0].kept == 3
