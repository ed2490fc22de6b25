"""A cache whose rest is loaded from elsewhere: a window that is not here does not keep it from reusing what is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvferry.core import GroupKind, KVLayout
from kvferry.kvcache import CacheStateError, KVCache, KVCacheManager, create_manager

SIZE, WINDOW = 4, 6
FULL = KVLayout(GroupKind.FULL, (0,), 1, 1, tokens_per_block=SIZE)
WINDOWED = KVLayout(GroupKind.WINDOW, (1,), 1, 1, tokens_per_block=SIZE, window=WINDOW)
SSM = KVLayout(GroupKind.SSM, (1,), 1, 1, tokens_per_block=1, planes=1)
PROMPT = list(range(100, 129))
Make = Callable[..., KVCacheManager]
Serve = Callable[..., KVCache]


@pytest.fixture(params=["cpp", "python"])
def make(request: pytest.FixtureRequest) -> Make:
    def build(*layouts: KVLayout, version: str = "V2", host_bytes: int = 0) -> KVCacheManager:
        nbytes = 32 * sum(layout.slot_nbytes for layout in layouts)
        return create_manager(version, layouts, nbytes, core=request.param, host_bytes=host_bytes)

    return build


def opened(manager: KVCacheManager, tokens: Sequence[int]) -> KVCache:
    """All but the last token's KV is about to be loaded."""
    cache = manager.open("", tokens, max_reuse=len(tokens) - 1, loads=True)
    manager.check_integrity()
    cache.reserve(len(tokens), loaded=len(tokens) - 1)
    manager.check_integrity()
    return cache


def arrive(manager: KVCacheManager, cache: KVCache, tokens: Sequence[int]) -> None:
    """As a decode worker does it: what the first advance makes stale is dropped by the second."""
    for _ in range(2):
        cache.advance(len(tokens) - 1)
    cache.commit(tokens)
    manager.check_integrity()


def load(manager: KVCacheManager, tokens: Sequence[int]) -> None:
    cache = opened(manager, tokens)
    arrive(manager, cache, tokens)
    cache.close()


def test_full_attention_is_reused_and_the_window_is_loaded(make: Make) -> None:
    manager = make(FULL, WINDOWED)
    load(manager, PROMPT[:24])  # the token at 23 looks back to 18, in block 4: blocks 0 to 3 of the window never came
    assert manager.match("", PROMPT[:23]) == 0
    again = opened(manager, PROMPT[:24])
    assert again.lacks_windows
    assert (again.reused, again.history, again.committed) == (20, 20, 20)
    assert (again.first_block(0), len(again.block_table(0))) == (0, 6)
    assert (again.first_block(1), len(again.block_table(1))) == (4, 2), "its own, to be filled"
    arrive(manager, again, PROMPT[:24])
    assert not again.lacks_windows
    again.close()
    assert manager.counts().free == manager.counts().total
    computed = manager.open("", PROMPT[:24], max_reuse=23)
    assert (computed.reused, computed.lacks_windows) == (0, False), "one that is not loaded needs all groups"


def test_another_prompt_that_begins_alike_reuses_what_both_have(make: Make) -> None:
    manager = make(FULL, WINDOWED)
    load(manager, PROMPT[:24])
    other = opened(manager, [*PROMPT[:13], *range(11)])
    assert (other.reused, other.lacks_windows) == (12, True)
    assert (other.first_block(1), len(other.block_table(1))) == (4, 2)


def test_what_was_loaded_of_a_window_becomes_part_of_the_published_blocks(make: Make) -> None:
    manager = make(FULL, WINDOWED)
    load(manager, PROMPT)  # window blocks 5 and 6
    assert manager.match("", PROMPT[:28]) == 28
    assert manager.match("", PROMPT[:24]) == 0, "goes on from 24, which looks back to block 4"
    load(manager, PROMPT[:24])  # window blocks 4 and 5, of which 5 is there already
    assert manager.match("", PROMPT[:24]) == 24
    assert manager.match("", PROMPT[:28]) == 28


def test_something_is_left_to_load(make: Make) -> None:
    """An empty load would not bring the window."""
    manager = make(FULL, WINDOWED)
    load(manager, PROMPT[:24])
    cache = manager.open("", PROMPT[:20], max_reuse=20, loads=True)
    assert (cache.reused, cache.lacks_windows) == (16, True)
    first = manager.open("", PROMPT[:4], max_reuse=4, loads=True)
    assert (first.reused, first.lacks_windows) == (0, False)


def test_a_window_that_is_here_is_used(make: Make, serve: Serve) -> None:
    """Also where the others reach further: less would move of these, and more of the window."""
    manager = make(FULL, WINDOWED)
    serve(manager, PROMPT[:24]).close()
    cache = manager.open("", PROMPT[:24], max_reuse=23, loads=True)
    assert (cache.reused, cache.lacks_windows) == (20, False)
    assert (cache.first_block(1), len(cache.block_table(1))) == (3, 2)


def test_states_come_with_the_rest(make: Make, serve: Serve) -> None:
    manager = make(FULL, SSM)
    serve(manager, PROMPT[:14]).close()
    assert manager.match("", PROMPT[:13]) == 0, "no snapshot was taken"
    cache = opened(manager, PROMPT[:14])
    assert (cache.reused, cache.lacks_windows, len(cache.block_table(1))) == (12, True, 1)
    with pytest.raises(CacheStateError, match="being loaded"):
        cache.snapshot()
    arrive(manager, cache, PROMPT[:14])
    assert not cache.lacks_windows


def test_nothing_is_read_or_left_to_others_before_it_is_there(make: Make) -> None:
    manager = make(FULL, WINDOWED, host_bytes=1 << 12)
    load(manager, PROMPT[:24])
    cache = opened(manager, PROMPT[:24])
    with pytest.raises(CacheStateError, match="being loaded"):
        cache.pin()
    for _ in range(2):
        cache.advance(23)
    assert not cache.suspend(), "it has not been published, and might hold part of a block"
    cache.keep_private()
    cache.commit(PROMPT[:24])
    manager.check_integrity()
    assert cache.lacks_windows
    assert len(cache.pin().tables[1].block_ids) == 2


def test_a_failed_load_leaves_its_window_in_quarantine(make: Make) -> None:
    manager = make(FULL, WINDOWED)
    load(manager, PROMPT[:24])
    cache = opened(manager, PROMPT[:24])
    doubtful = list(cache.block_table(1))
    hold = cache.quarantine()
    assert [len(table.block_ids) for table in hold.tables] == [1, 2]
    assert list(hold.tables[1].block_ids) == doubtful
    manager.check_integrity()
    hold.release()
    assert manager.counts().free == manager.counts().total


def test_v1_keeps_whole_windows_and_reuses_them(serve: Serve) -> None:
    manager = create_manager("V1", (FULL, WINDOWED), 32 * (FULL.slot_nbytes + WINDOWED.slot_nbytes))
    serve(manager, PROMPT[:24]).close()
    cache = manager.open("", PROMPT[:24], max_reuse=23, loads=True)
    assert (cache.reused, cache.lacks_windows) == (20, False)
