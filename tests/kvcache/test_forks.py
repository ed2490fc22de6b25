"""Beams: caches that branch off from one another, share what they have and copy what they go on to write."""

from __future__ import annotations

import pytest
import torch

from kvferry.core import GroupKind, KVLayout
from kvferry.kvcache import CacheStateError, ForkableCache, KVCacheManager, OutOfBlocksError, create_manager

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0, 1), 1, 2, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (2,), 1, 2, tokens_per_block=SIZE, window=6)
LAYOUTS = (FULL, WINDOW)
PROMPT = list(range(100, 110))  # two full blocks of 4 and a half


def make(blocks: int = 16, **settings: object) -> KVCacheManager:
    row_nbytes = sum(layout.slot_nbytes for layout in LAYOUTS)
    return create_manager("V1", LAYOUTS, blocks * row_nbytes, **settings)  # type: ignore[arg-type]


def written(manager: KVCacheManager, tokens: list[int], commit: bool = True) -> ForkableCache:
    cache = manager.open("", tokens, max_reuse=0)
    assert isinstance(cache, ForkableCache)
    cache.reserve(len(tokens))
    write(manager, cache, tokens)
    if commit:
        cache.commit(tokens)
    return cache


def write(manager: KVCacheManager, cache: ForkableCache, tokens: list[int]) -> None:
    """Each position from history on gets its token for a value."""
    for group, pool in enumerate(manager.pools):
        for position in range(cache.history, len(tokens)):
            pool.view[cache.block_table(group)[position // SIZE], :, :, :, position % SIZE] = float(tokens[position])
    cache.advance(len(tokens))


def read(manager: KVCacheManager, cache: ForkableCache) -> list[list[float]]:
    """Per group, the values below history."""
    held = [pool.view[list(cache.block_table(g))][:, -1, -1, 0, :, 0] for g, pool in enumerate(manager.pools)]
    return [values.flatten()[: cache.history].tolist() for values in held]


def test_a_fork_copies_nothing_and_shares_every_block() -> None:
    manager = make()
    cache = written(manager, PROMPT)
    before = manager.counts()
    twin = cache.fork()
    assert list(twin.block_table(0)) == list(cache.block_table(0))
    assert (twin.committed, twin.history, twin.capacity) == (8, 10, 10)
    assert manager.counts() == before
    manager.check_integrity()
    cache.close()
    assert manager.counts().free == before.free, "the twin keeps all of them"
    assert read(manager, twin) == [[float(token) for token in PROMPT]] * 2
    twin.close()
    assert manager.counts().free == manager.counts().total


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_writes_first_gets_a_copy_of_the_partly_filled_block(first: int) -> None:
    manager = make()
    cache = written(manager, PROMPT)
    pair = [cache, cache.fork()]
    tail = cache.block_table(0)[2]
    generation = int(manager.pools[0].generations[tail])
    one, other = pair[first], pair[1 - first]
    one.reserve(11)
    assert one.block_table(0)[2] != tail
    assert list(one.block_table(0))[:2] == list(other.block_table(0))[:2]
    write(manager, one, [*PROMPT, 1])
    other.reserve(11)
    assert other.block_table(0)[2] == tail, "nobody else has it any more: it is written in place"
    assert int(manager.pools[0].generations[tail]) == generation
    write(manager, other, [*PROMPT, 2])
    assert read(manager, one) == [[*map(float, PROMPT), 1.0]] * 2
    assert read(manager, other) == [[*map(float, PROMPT), 2.0]] * 2
    manager.check_integrity()


def test_at_the_end_of_a_block_there_is_nothing_to_copy() -> None:
    manager = make()
    cache = written(manager, PROMPT[:8])
    twin = cache.fork()
    twin.reserve(9)
    assert list(twin.block_table(0))[:2] == list(cache.block_table(0))
    assert manager.counts().free == manager.counts().total - 3 * len(LAYOUTS)


def test_a_fork_gives_back_what_was_reserved_beyond_history() -> None:
    manager = make()
    cache = written(manager, PROMPT)
    cache.reserve(16)
    assert len(cache.block_table(0)) == 4
    twin = cache.fork()
    assert (cache.capacity, len(cache.block_table(0)), twin.capacity) == (10, 3, 10)


def test_branches_publish_what_each_of_them_wrote() -> None:
    manager = make()
    cache = written(manager, PROMPT)
    twin = cache.fork()
    mine, theirs = [*PROMPT, 1, 1], [*PROMPT, 2, 2]
    for branch, tokens in ((cache, mine), (twin, theirs)):
        branch.reserve(12)
        write(manager, branch, tokens)
        branch.commit(tokens)
    assert [manager.match("", tokens) for tokens in (mine, theirs, PROMPT)] == [12, 12, 8]
    cache.close()
    twin.close()
    manager.check_integrity()
    assert manager.counts().free == manager.counts().total


def test_shared_blocks_may_be_published_by_either_side() -> None:
    manager = make()
    cache = written(manager, PROMPT, commit=False)
    twin = cache.fork()
    assert twin.committed == 0
    cache.commit(PROMPT)
    manager.check_integrity()
    cache.close()
    assert manager.match("", PROMPT) == 8
    twin.commit(PROMPT)
    assert twin.committed == 8
    twin.close()
    manager.check_integrity()
    assert manager.counts().free == manager.counts().total


def test_without_reuse_beams_share_blocks_that_nobody_else_finds() -> None:
    manager = make(prefix_reuse=False)
    cache = written(manager, PROMPT)
    twin = cache.fork()
    twin.reserve(12)
    assert manager.counts().free == manager.counts().total - 4 * len(LAYOUTS)
    assert manager.match("", PROMPT) == 0
    manager.check_integrity()


def test_a_copy_that_finds_no_page_is_refused_and_nothing_changes() -> None:
    manager = make(3)
    cache = written(manager, PROMPT)
    twin = cache.fork()
    table = list(twin.block_table(0))
    with pytest.raises(OutOfBlocksError, match=r"kv_cache\.bytes"):
        twin.reserve(11)
    assert (list(twin.block_table(0)), twin.capacity) == (table, 10)
    manager.check_integrity()
    cache.close()
    twin.reserve(11)
    assert list(twin.block_table(0)) == table


def test_a_pin_does_not_make_a_block_shared() -> None:
    manager = make()
    cache = written(manager, PROMPT)
    hold = cache.pin()
    table = list(cache.block_table(0))
    cache.reserve(11)
    assert list(cache.block_table(0)) == table
    hold.release()


def test_quarantine_keeps_only_what_a_late_writer_could_reach() -> None:
    manager = make()
    cache = written(manager, PROMPT, commit=False)
    twin = cache.fork()
    twin.reserve(16)
    own = list(twin.block_table(0))[2:]
    hold = twin.quarantine()
    assert list(hold.tables[0].block_ids) == own
    assert hold.tables[0].first_block == 2
    manager.check_integrity()
    assert read(manager, cache) == [[float(token) for token in PROMPT]] * 2
    hold.release()
    cache.close()
    assert manager.counts().free == manager.counts().total


def test_a_suspended_beam_comes_back_beside_its_sibling() -> None:
    manager = make(host_bytes=1 << 16)
    cache = written(manager, PROMPT)
    twin = cache.fork()
    assert twin.suspend()
    cache.reserve(12)
    write(manager, cache, [*PROMPT, 1, 1])
    twin.resume(PROMPT)
    assert read(manager, twin) == [[float(token) for token in PROMPT]] * 2
    assert list(twin.block_table(0))[:2] == list(cache.block_table(0))[:2], "committed blocks are shared again"
    manager.check_integrity()
    twin.suspend()
    with pytest.raises(CacheStateError, match="suspended"):
        twin.fork()


def test_many_beams_hold_many_distinct_tails() -> None:
    manager = make(40)
    beams = [written(manager, PROMPT)]
    beams += [beams[0].fork() for _ in range(7)]
    for value, beam in enumerate(beams):
        beam.reserve(11)
        write(manager, beam, [*PROMPT, value])
    assert len({beam.block_table(0)[2] for beam in beams}) == 8
    assert [torch.tensor(read(manager, beam))[0, -1].item() for beam in beams] == list(range(8))
    assert manager.counts().free == manager.counts().total - (2 + 8) * len(LAYOUTS)
