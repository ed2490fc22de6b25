"""Reusing the beginning of a published block: by copy, and only when asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.core import GroupKind, KVLayout
from kvferry.kvcache import KVCache, KVCacheManager, create_manager

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (1,), 1, 1, tokens_per_block=SIZE, window=6)
SSM = KVLayout(GroupKind.SSM, (1,), 1, 1, tokens_per_block=1, planes=1)
PROMPT = list(range(100, 112))
Make = Callable[..., KVCacheManager]
Serve = Callable[..., KVCache]


@pytest.fixture(params=["cpp", "python"])
def make(request: pytest.FixtureRequest) -> Make:
    def build(*layouts: KVLayout, blocks: int = 16) -> KVCacheManager:
        nbytes = blocks * sum(layout.slot_nbytes for layout in layouts)
        return create_manager("V2", layouts, nbytes, core=request.param)

    return build


def contents(manager: KVCacheManager, cache: KVCache) -> list[float]:
    rows = manager.pools[0].view[list(cache.block_table(0)), 0, 0, 0, :, 0]
    values: list[float] = rows.flatten().tolist()
    return values


def publish(manager: KVCacheManager, serve: Serve, tokens: list[int]) -> KVCache:
    cache = serve(manager, tokens, reuse=0)
    for index, slot in enumerate(cache.block_table(0)):
        for offset, token in enumerate(tokens[index * SIZE : (index + 1) * SIZE]):
            manager.pools[0].view[slot, 0, :, 0, offset, 0] = float(token)
    return cache


def test_the_common_part_of_a_block_is_copied(make: Make, serve: Serve) -> None:
    manager = make(FULL)
    source = publish(manager, serve, PROMPT)
    fork = manager.open("", [*PROMPT[:7], 1, 2], max_reuse=8, min_partial=2)
    assert (fork.reused, fork.committed, fork.history, fork.capacity) == (7, 4, 7, 7)
    assert contents(manager, fork)[:7] == [float(token) for token in PROMPT[:7]]
    assert fork.block_table(0)[0] == source.block_table(0)[0]
    assert fork.block_table(0)[1] not in source.block_table(0)
    manager.pools[0].view[fork.block_table(0)[1], 0, :, 0, 3, 0] = -1.0
    assert contents(manager, source)[:12] == [float(token) for token in PROMPT], "the source is never written"
    fork.reserve(9)
    fork.advance(9)
    fork.commit([*PROMPT[:7], 1, 2])
    assert manager.match("", [*PROMPT[:7], 1, 2]) == 8
    manager.check_integrity()


def test_a_prompt_cached_whole_leaves_one_token_to_compute(make: Make, serve: Serve) -> None:
    manager = make(FULL)
    publish(manager, serve, PROMPT).close()
    assert manager.open("", PROMPT, max_reuse=11).reused == 8
    again = manager.open("", PROMPT, max_reuse=11, min_partial=1)
    assert again.reused == 11
    assert contents(manager, again)[:11] == [float(token) for token in PROMPT[:11]]


@pytest.mark.parametrize(("least", "reused"), [(0, 4), (1, 6), (2, 6), (3, 4)])
def test_only_what_is_worth_a_copy_is_copied(make: Make, serve: Serve, least: int, reused: int) -> None:
    manager = make(FULL)
    publish(manager, serve, PROMPT)
    assert manager.open("", [*PROMPT[:6], 1, 1], max_reuse=7, min_partial=least).reused == reused


def test_of_several_blocks_the_closest_is_taken(make: Make, serve: Serve) -> None:
    manager = make(FULL)
    for tail in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 8, 8, 8]):
        publish(manager, serve, [*PROMPT[:4], *tail])
    fork = manager.open("", [*PROMPT[:4], 1, 2, 3, 7], max_reuse=8, min_partial=1)
    assert fork.reused == 7
    assert contents(manager, fork)[4:7] == [1.0, 2.0, 3.0]


def test_another_scope_shares_nothing(make: Make, serve: Serve) -> None:
    manager = make(FULL)
    publish(manager, serve, PROMPT)
    assert manager.open("salt", PROMPT, max_reuse=11, min_partial=1).reused == 0


def test_without_a_page_to_copy_to_whole_blocks_are_reused(make: Make, serve: Serve) -> None:
    manager = make(FULL, blocks=3)
    publish(manager, serve, PROMPT).close()
    fork = manager.open("", PROMPT, max_reuse=11, min_partial=1)
    assert fork.reused == 8, "the source itself is the last page there is"
    assert manager.match("", PROMPT) == 12
    manager.check_integrity()


def test_windows_take_part_and_states_rule_it_out(make: Make, serve: Serve) -> None:
    windowed = make(FULL, WINDOW)
    publish(windowed, serve, PROMPT)
    fork = windowed.open("", PROMPT, max_reuse=11, min_partial=1)
    assert (fork.reused, len(fork.block_table(0))) == (11, 3)
    windowed.check_integrity()

    hybrid = make(FULL, SSM)
    cache = serve(hybrid, PROMPT[:8], reuse=0)
    cache.snapshot()
    cache.close()
    serve(hybrid, PROMPT).close()
    assert hybrid.open("", PROMPT, max_reuse=11, min_partial=1).reused == 8


def test_v1_reuses_whole_blocks_only(serve: Serve) -> None:
    manager = create_manager("V1", (FULL,), 1 << 10)
    serve(manager, PROMPT)
    assert manager.open("", PROMPT, max_reuse=11, min_partial=1).reused == 8
