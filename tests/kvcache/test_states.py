"""State groups under V2: one live slot per request, snapshots where somebody asked for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.core import ConfigError, GroupKind, KVLayout
from kvferry.kvcache import CacheStateError, KVCache, KVCacheManager, OutOfBlocksError, create_manager
from kvferry.kvcache.pool import blocks_for_budget, slot_counts

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=SIZE)
CONV = KVLayout(GroupKind.CONV, (1, 2), 1, 3, tokens_per_block=1, planes=1)
SSM = KVLayout(GroupKind.SSM, (1, 2), 2, 5, tokens_per_block=1, planes=1)
PROMPT = list(range(100, 120))
MakeHybrid = Callable[..., KVCacheManager]


@pytest.fixture(params=["cpp", "python"])
def make_hybrid(request: pytest.FixtureRequest) -> MakeHybrid:
    def make(blocks: int = 16, host_blocks: int = 0) -> KVCacheManager:
        layouts = (FULL, CONV, SSM)
        states = slot_counts(layouts, blocks)[1]
        nbytes = blocks * FULL.slot_nbytes + states * (CONV.slot_nbytes + SSM.slot_nbytes)
        host = slot_counts(layouts, host_blocks)[1] * (CONV.slot_nbytes + SSM.slot_nbytes)
        host_bytes = host_blocks * FULL.slot_nbytes + host if host_blocks else 0
        return create_manager("V2", layouts, nbytes, debug=True, core=request.param, host_bytes=host_bytes)

    return make


def step(manager: KVCacheManager, cache: KVCache, tokens: list[int], stop: int) -> None:
    """Computes to `stop`: a state becomes the sum of all tokens so far, through what the cache holds."""
    cache.reserve(stop)
    full = manager.pools[0].view
    for position in range(cache.history, stop):
        full[cache.block_table(0)[position // SIZE], :, :, :, position % SIZE] = float(tokens[position])
    for group in (1, 2):
        (slot,) = cache.block_table(group)
        manager.pools[group].view[slot] += float(sum(tokens[cache.history : stop]))
    cache.advance(stop)
    cache.commit(tokens)


def states(manager: KVCacheManager, cache: KVCache) -> list[float]:
    """The states' value, which is one and the same in all their elements."""
    found = []
    for group in (1, 2):
        (slot,) = cache.block_table(group)
        values = manager.pools[group].view[slot].flatten().unique().tolist()
        assert len(values) == 1
        found += values
    return found


def test_a_prefix_is_reused_exactly_where_there_is_a_snapshot(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid()
    cache = manager.open("", PROMPT, max_reuse=0)
    step(manager, cache, PROMPT, 8)
    assert cache.snapshot()
    step(manager, cache, PROMPT, 20)
    cache.close()
    assert manager.match("", PROMPT) == 8
    assert manager.match("", PROMPT[:7]) == 0

    again = manager.open("", PROMPT, max_reuse=19)
    assert (again.reused, again.history) == (8, 8)
    step(manager, again, PROMPT, 20)
    assert states(manager, again) == [float(sum(PROMPT))] * 2
    manager.check_integrity()


def test_a_snapshot_is_never_written(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid()
    first = manager.open("", PROMPT, max_reuse=0)
    step(manager, first, PROMPT, 8)
    first.snapshot()
    first.close()
    forks = [manager.open("", PROMPT[:8] + [n] * 4, max_reuse=8) for n in (1, 2)]
    assert list(forks[0].block_table(1)) == list(forks[1].block_table(1)), "both wait for a slot of their own"
    for fork, n in zip(forks, (1, 2), strict=True):
        step(manager, fork, PROMPT[:8] + [n] * 4, 12)
        assert states(manager, fork) == [float(sum(PROMPT[:8]) + 4 * n)] * 2
        fork.close()
    again = manager.open("", PROMPT, max_reuse=8)
    assert states(manager, again) == [float(sum(PROMPT[:8]))] * 2


def test_a_fresh_state_is_zero_whoever_had_the_slot_before(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid()
    for _ in range(3):
        cache = manager.open("", PROMPT, max_reuse=0)
        cache.reserve(4)
        assert states(manager, cache) == [0.0, 0.0]
        step(manager, cache, PROMPT, 4)
        cache.close()


def test_live_states_are_limited_by_their_slots_and_snapshots_make_way(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid(blocks=32)  # two slots per state group
    first = manager.open("", PROMPT, max_reuse=0)
    step(manager, first, PROMPT, 8)
    assert first.snapshot()
    assert not first.snapshot(), "there is one already"
    second = manager.open("x", PROMPT, max_reuse=0)
    assert manager.can_reserve(4)
    second.reserve(4)
    assert manager.match("", PROMPT) == 0, "the snapshot's slot is a live one now"
    assert not manager.can_reserve(4)
    third = manager.open("y", PROMPT, max_reuse=0)
    with pytest.raises(OutOfBlocksError, match="layer group 1 \\(conv\\)"):
        third.reserve(4)
    step(manager, second, PROMPT, 4)
    assert not second.snapshot(), "no room"
    manager.check_integrity()
    for cache in (first, second, third):
        cache.close()
    assert manager.counts().free == manager.counts().total


def test_a_suspended_state_comes_back(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid(host_blocks=16)
    cache = manager.open("", PROMPT, max_reuse=0)
    step(manager, cache, PROMPT, 10)
    assert cache.suspend()
    assert manager.counts().free == manager.counts().total
    others = [manager.open(scope, PROMPT, max_reuse=0) for scope in ("x", "y")]
    for other in others:
        step(manager, other, PROMPT, 8)
        other.close()
    cache.resume(PROMPT)
    assert states(manager, cache) == [float(sum(PROMPT[:10]))] * 2
    step(manager, cache, PROMPT, 20)
    assert states(manager, cache) == [float(sum(PROMPT))] * 2
    manager.check_integrity()


def test_a_snapshot_that_was_pushed_out_comes_up_from_the_host_tier(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid(blocks=5, host_blocks=16)
    cache = manager.open("", PROMPT, max_reuse=0)
    step(manager, cache, PROMPT, 8)
    assert cache.snapshot()
    cache.close()
    for scope in ("x", "y"):
        other = manager.open(scope, PROMPT, max_reuse=0)
        step(manager, other, PROMPT, 20)
        other.snapshot()
        other.close()
    again = manager.open("", PROMPT, max_reuse=19)
    assert again.reused == 8
    assert states(manager, again) == [float(sum(PROMPT[:8]))] * 2
    step(manager, again, PROMPT, 20)
    assert states(manager, again) == [float(sum(PROMPT))] * 2
    manager.check_integrity()


def test_pins_and_quarantine_cover_the_live_state(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid()
    cache = manager.open("", PROMPT, max_reuse=0)
    step(manager, cache, PROMPT, 6)
    live = [tuple(cache.block_table(group)) for group in (1, 2)]
    pin = cache.pin()
    assert [table.block_ids for table in pin.tables[1:]] == live
    assert [table.first_block for table in pin.tables] == [0, 0, 0]
    quarantine = cache.quarantine()
    assert [table.block_ids for table in quarantine.tables[1:]] == live
    assert manager.counts().quarantined == 1 + 2
    pin.release()
    quarantine.release()
    assert manager.counts().free == manager.counts().total


def test_a_snapshot_needs_a_committed_end(make_hybrid: MakeHybrid) -> None:
    manager = make_hybrid()
    cache = manager.open("", PROMPT, max_reuse=0)
    with pytest.raises(CacheStateError, match="snapshot"):
        cache.snapshot()
    step(manager, cache, PROMPT, 6)
    with pytest.raises(CacheStateError, match="history is 6 tokens, 4 are committed"):
        cache.snapshot()


def test_without_state_groups_there_is_nothing_to_take_a_snapshot_of(version: str, core: str) -> None:
    cache = create_manager(version, [FULL], 1 << 12, core=core).open("", PROMPT, max_reuse=0)
    cache.reserve(4)
    cache.advance(4)
    cache.commit(PROMPT)
    assert not cache.snapshot()


@pytest.mark.parametrize("nbytes", [2_000, 10_001, 123_456])
def test_state_slots_and_blocks_share_the_budget(nbytes: int) -> None:
    layouts = (FULL, CONV, SSM)
    blocks = blocks_for_budget(layouts, nbytes)

    def cost(blocks: int) -> int:
        return sum(n * layout.slot_nbytes for n, layout in zip(slot_counts(layouts, blocks), layouts, strict=True))

    assert cost(blocks) <= nbytes < cost(blocks + 1)
    manager = create_manager("V2", layouts, nbytes)
    assert sum(pool.region.nbytes for pool in manager.pools) == cost(blocks)
    assert manager.max_tokens() == blocks * SIZE


def test_a_model_of_states_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one attention"):
        create_manager("V2", [CONV], 1 << 20)
