"""Layer groups that forget: windows and chunks under V2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.core import GroupKind, KVLayout
from kvferry.kvcache import KVCache, KVCacheManager, create_manager

Serve = Callable[..., KVCache]
PROMPT = list(range(40))
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=4)
WINDOW = KVLayout(GroupKind.WINDOW, (1,), 1, 1, tokens_per_block=4, window=8)
CHUNKED = KVLayout(GroupKind.CHUNKED, (1,), 1, 1, tokens_per_block=4, window=16)


ManagerOf = Callable[..., KVCacheManager]


@pytest.fixture(params=["cpp", "python"])
def manager_of(request: pytest.FixtureRequest) -> ManagerOf:
    def make(*layouts: KVLayout, blocks: int = 16) -> KVCacheManager:
        nbytes = blocks * sum(layout.slot_nbytes for layout in layouts)
        return create_manager("V2", layouts, nbytes, core=request.param)

    return make


@pytest.mark.parametrize(
    ("layout", "history", "first"),
    [
        (WINDOW, 7, 0),  # the token at 7 sees 0..7
        (WINDOW, 10, 0),  # the token at 10 sees 3..10, block 0 ends with 3
        (WINDOW, 11, 1),
        (WINDOW, 40, 8),
        (CHUNKED, 15, 0),
        (CHUNKED, 16, 4),
        (CHUNKED, 31, 4),
        (CHUNKED, 40, 8),
    ],
)
def test_stale_blocks_leave_when_history_passes_them(
    manager_of: ManagerOf, layout: KVLayout, history: int, first: int
) -> None:
    manager = manager_of(FULL, layout)
    cache = manager.open("", PROMPT, max_reuse=0)
    cache.reserve(40)
    cache.advance(history)
    cache.commit(PROMPT)
    assert (cache.first_block(0), len(cache.block_table(0))) == (0, 10)
    assert (cache.first_block(1), len(cache.block_table(1))) == (first, 10 - first)


def test_a_window_never_committed_is_dropped_a_step_later(manager_of: ManagerOf) -> None:
    manager = manager_of(FULL, WINDOW)
    cache = manager.open("", PROMPT, max_reuse=0)
    cache.reserve(40)
    cache.advance(20)
    assert cache.first_block(1) == 0, "these could still be committed"
    cache.advance(21)
    assert cache.first_block(1) == (20 + 1 - 8) // 4
    cache.commit(PROMPT)
    assert manager.match("", PROMPT[:20]) == 20
    assert manager.match("", PROMPT[:16]) == 0, "its window was never published"


def test_another_request_may_fork_in_the_middle_of_a_prompt(manager_of: ManagerOf, serve: Serve) -> None:
    manager = manager_of(FULL, WINDOW)
    serve(manager, PROMPT).close()
    fork = manager.open("", [*PROMPT[:20], 99, 99], max_reuse=21)
    assert fork.reused == 20
    assert fork.first_block(1) == 3
    assert len(fork.block_table(1)) == 2


def test_the_usable_prefix_is_what_every_group_can_serve(manager_of: ManagerOf, serve: Serve) -> None:
    manager = manager_of(FULL, WINDOW)
    first = serve(manager, PROMPT[:24])
    window = list(first.block_table(1))
    first.close()
    # The window's blocks go first, oldest first: stale ones, then the deepest of what was held to the end.
    filler = manager.open("x", [1], max_reuse=0)
    filler.reserve(40)
    assert manager.match("", PROMPT[:24]) == 24
    filler.reserve(56)
    assert manager.match("", PROMPT[:24]) < 24
    assert set(filler.block_table(1)) & set(window)
    manager.check_integrity()


def test_a_lost_window_block_is_supplied_by_the_next_request_that_computes_it(
    manager_of: ManagerOf, serve: Serve
) -> None:
    manager = manager_of(FULL, WINDOW)
    holder = serve(manager, PROMPT[:24])
    manager.clear_reuse()  # the stale window blocks of a live cache are forgotten, its full ones stay
    assert manager.match("", PROMPT[:24]) == 24
    assert manager.match("", PROMPT[:12]) == 0
    again = serve(manager, PROMPT[:12], reuse=0)
    assert list(again.block_table(0)) == list(holder.block_table(0))[:3]
    again.close()
    assert manager.match("", PROMPT[:12]) == 12
    manager.check_integrity()


def test_blocks_without_a_full_group_vanish_with_their_last_window_slot(manager_of: ManagerOf, serve: Serve) -> None:
    manager = manager_of(WINDOW)
    serve(manager, PROMPT).close()
    assert manager.match("", PROMPT) == 40
    manager.clear_reuse()
    manager.check_integrity()
    assert manager.match("", PROMPT) == 0
    assert manager.counts().free == manager.counts().total == 16


def test_evicting_a_full_block_takes_its_window_block_along(manager_of: ManagerOf, serve: Serve) -> None:
    manager = manager_of(FULL, WINDOW, blocks=8)
    serve(manager, PROMPT[:8]).close()
    cached = manager.counts().cached
    filler = manager.open("x", [1], max_reuse=0)
    filler.reserve(28)
    counts = manager.counts()
    assert manager.match("", PROMPT[:8]) == 4
    assert cached - counts.cached == 2
    manager.check_integrity()
