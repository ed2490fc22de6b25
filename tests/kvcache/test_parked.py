"""Suspended caches on disk: they come back with their bytes, or say that they are lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from full_disk import half, no_space

from kvferry.core import GroupKind, KVLayout
from kvferry.kvcache import CacheLostError, CacheStateError, KVCache, KVCacheManager, create_manager
from kvferry.kvcache.disk_tier import DiskShelf
from kvferry.kvcache.records import Kind

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0, 1), 1, 2, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (2,), 1, 2, tokens_per_block=SIZE, window=6)
PROMPT = list(range(100, 120))
MakeDisk = Callable[..., KVCacheManager]


@pytest.fixture(params=["cpp", "python"])
def make_parking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDisk]:
    """make_parking(host, disk): eight blocks of a full group and a window, over a host tier that is too small."""
    made: list[KVCacheManager] = []

    def make(host: int = 2, disk: int = 16) -> KVCacheManager:
        layouts = (FULL, WINDOW)
        row_nbytes = sum(layout.slot_nbytes for layout in layouts)
        made.append(
            create_manager(
                "V2",
                layouts,
                8 * row_nbytes,
                debug=True,
                core=request.param,
                host_bytes=host * row_nbytes,
                disk_bytes=disk * (row_nbytes + 64 * len(layouts)),
                disk_dir=tmp_path / f"kv{len(made)}",
            )
        )
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def parked(manager: KVCacheManager) -> list[int]:
    return [tier.parked for tier in manager.tier_counts()]


def write(manager: KVCacheManager, cache: KVCache, tokens: list[int], stop: int) -> None:
    cache.reserve(stop)
    for group, pool in enumerate(manager.pools):
        for position in range(cache.history, stop):
            slot = cache.block_table(group)[position // SIZE - cache.first_block(group)]
            pool.view[slot, :, :, :, position % SIZE] = float(tokens[position])
    cache.advance(stop)
    cache.commit(tokens)


def values(manager: KVCacheManager, cache: KVCache, group: int) -> list[float]:
    """What each position that the group still holds was written with."""
    table = list(cache.block_table(group))
    held = manager.pools[group].view[table][:, 0, 0, 0, :, 0].flatten().tolist()
    return held[: cache.history - cache.first_block(group) * SIZE]


def suspended(manager: KVCacheManager) -> KVCache:
    cache = manager.open("", PROMPT, max_reuse=0)
    write(manager, cache, PROMPT, 18)
    assert cache.suspend()
    return cache


def pass_through_all_pages(manager: KVCacheManager) -> None:
    """A request that overwrites what others have left."""
    other = manager.open("x", PROMPT, max_reuse=0)
    write(manager, other, [7] * 32, 32)
    other.close()


def test_what_the_host_tier_has_no_room_for_is_parked_on_disk(make_parking: MakeDisk) -> None:
    manager = make_parking()
    cache = suspended(manager)
    # Five full blocks; the token at 18 looks back to 13, in block 3 of 5.
    assert parked(manager) == [0, 5 + 2]
    assert manager.counts().free == manager.counts().total
    pass_through_all_pages(manager)
    cache.resume(PROMPT)
    assert values(manager, cache, 0) == [float(token) for token in PROMPT[:18]]
    assert values(manager, cache, 1) == [float(token) for token in PROMPT[12:18]]
    assert parked(manager) == [0, 0]
    write(manager, cache, PROMPT, 20)
    cache.close()
    manager.check_integrity()


def test_what_is_parked_on_disk_is_read_before_it_is_resumed(
    make_parking: MakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_parking()
    cache = manager.open("", PROMPT, max_reuse=0)
    with pytest.raises(CacheStateError, match="prepare_resume: the cache is open"):
        cache.prepare_resume(PROMPT)
    write(manager, cache, PROMPT, 18)
    assert cache.suspend()
    pass_through_all_pages(manager)
    shelves = manager._books.host._disk.shelves  # type: ignore[attr-defined]
    shelves[0]._writer.submit(int).result()
    for shelf in shelves:
        shelf._forget_written()
    go_on, read_file, threads = threading.Event(), DiskShelf._read_file, list[str]()

    def slowly(shelf: DiskShelf, slot: int, kind: Kind, digest: bytes) -> bytes | None:
        threads.append(threading.current_thread().name)
        go_on.wait(30)
        return read_file(shelf, slot, kind, digest)

    monkeypatch.setattr(DiskShelf, "_read_file", slowly)
    assert not cache.prepare_resume(PROMPT)
    assert not cache.prepare_resume(PROMPT)
    go_on.set()
    deadline = time.monotonic() + 20
    while not cache.prepare_resume(PROMPT):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cache.resume(PROMPT)
    assert values(manager, cache, 0) == [float(token) for token in PROMPT[:18]]
    assert values(manager, cache, 1) == [float(token) for token in PROMPT[12:18]]
    assert (len(threads), set(threads)) == (5 + 2, {"kv-disk-read_0"}), "each once, and none by the engine"
    cache.close()
    manager.check_integrity()


def test_a_cache_that_is_closed_while_it_is_read_leaves_nothing(
    make_parking: MakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_parking()
    cache = suspended(manager)
    cache.prepare_resume(PROMPT)
    cache.close()
    assert parked(manager) == [0, 0]
    manager.check_integrity()


def test_a_parked_cache_that_was_torn_is_lost_and_says_so(make_parking: MakeDisk, tmp_path: Path) -> None:
    manager = make_parking()
    cache = suspended(manager)
    other = manager.open("x", PROMPT, max_reuse=0)  # nothing of it is left in the pools
    write(manager, other, [7] * 32, 32)
    other.close()
    shelves = manager._books.host._disk.shelves  # type: ignore[attr-defined]
    shelves[0]._writer.submit(int).result()
    for shelf in shelves:
        shelf._forget_written()
    for path in (tmp_path / "kv0").glob("group0-*.kv"):
        content = bytearray(path.read_bytes())
        at = content.index(b"kvparked")
        content[at + 70] ^= 1
        path.write_bytes(content)
    counts = manager.counts()
    with pytest.raises(CacheLostError, match="compute it again"):
        cache.resume(PROMPT)
    assert cache.suspended
    assert manager.counts() == counts
    cache.close()
    assert parked(manager) == [0, 0]
    manager.check_integrity()


def test_without_room_on_disk_either_nothing_is_suspended(make_parking: MakeDisk) -> None:
    manager = make_parking(disk=4)
    cache = manager.open("", PROMPT, max_reuse=0)
    write(manager, cache, PROMPT, 18)
    assert not cache.suspend()
    assert parked(manager) == [0, 0]
    assert values(manager, cache, 0) == [float(token) for token in PROMPT[:18]]


@pytest.mark.parametrize("pwrite", [no_space, half])
def test_a_cache_that_a_full_disk_did_not_take_is_lost_and_says_so(
    make_parking: MakeDisk, monkeypatch: pytest.MonkeyPatch, pwrite: Callable[[int, bytes, int], int]
) -> None:
    monkeypatch.setattr(os, "pwrite", pwrite)
    manager = make_parking()
    cache = suspended(manager)
    pass_through_all_pages(manager)
    for shelf in manager._books.host._disk.shelves:  # type: ignore[attr-defined]
        shelf._writer.submit(int).result()
        shelf._forget_written()
    with pytest.raises(CacheLostError):
        cache.resume(PROMPT)
    cache.close()
    assert parked(manager) == [0, 0]
    manager.check_integrity()
