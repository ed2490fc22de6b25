"""The disk tier: what went down comes up again, also in another life, and what is torn is a miss."""

from __future__ import annotations

import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import half, no_space

from kvferry.core import ConfigError, GroupKind, KVLayout, TierCounts, block_digests
from kvferry.kvcache import KVCache, KVCacheManager, create_manager, disk_tier
from kvferry.kvcache.disk_tier import MAX_PENDING_WRITES, DiskShelf
from kvferry.kvcache.records import Kind

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0, 1), 1, 2, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (2,), 1, 2, tokens_per_block=SIZE, window=6)
PROMPT = list(range(100, 120))
MakeDisk = Callable[..., KVCacheManager]


@pytest.fixture(params=[(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def make_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDisk]:
    """make_disk(blocks=6, host=6, disk=40): managers over one folder, one after the other."""
    made: list[KVCacheManager] = []

    def make(blocks: int = 6, host: int = 6, disk: int = 40) -> KVCacheManager:
        row_nbytes = sum(layout.slot_nbytes for layout in request.param)
        for manager in made:
            manager.close()
        made[:] = [
            create_manager(
                "V2",
                request.param,
                blocks * row_nbytes,
                debug=True,
                host_bytes=host * row_nbytes,
                disk_bytes=disk * (row_nbytes + 64 * len(request.param)),
                disk_dir=tmp_path / "kv",
            )
        ]
        return made[0]

    yield make
    for manager in made:
        manager.close()


def fill(manager: KVCacheManager, tokens: list[int], scope: str = "") -> KVCache:
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
    for group, pool in enumerate(manager.pools):
        first = cache.first_block(group)
        held = pool.view[list(cache.block_table(group))][:, -1, -1, 0, :, 0].flatten().tolist()
        assert held == [value(tokens[: position + 1]) for position in range(first * SIZE, cache.history)]


def push_down(manager: KVCacheManager) -> None:
    """Fills pools and host tier with other prefixes, so that PROMPT's blocks end up on disk."""
    for number in range(3):
        fill(manager, [number] * 24, scope="filler").close()


def disk_counts(manager: KVCacheManager) -> TierCounts:
    return manager.tier_counts()[1]


def test_what_went_down_to_disk_comes_up_with_its_bytes(make_disk: MakeDisk) -> None:
    manager = make_disk()
    fill(manager, PROMPT).close()
    push_down(manager)
    assert disk_counts(manager).kept >= 5
    assert manager.match("", PROMPT) == 20
    again = manager.open("", PROMPT, max_reuse=20)
    assert again.reused == 20
    assert_written(manager, again, PROMPT)
    manager.check_integrity()


def test_it_is_found_again_in_another_life(make_disk: MakeDisk) -> None:
    first = make_disk()
    fill(first, PROMPT).close()
    push_down(first)
    second = make_disk()
    assert second.counts().cached == 0
    again = second.open("", PROMPT, max_reuse=20)
    assert again.reused == 20
    assert_written(second, again, PROMPT)
    assert second.match("other scope", PROMPT) == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "swap"])
def test_a_record_that_is_not_whole_is_a_miss(make_disk: MakeDisk, tmp_path: Path, damage: str) -> None:
    manager = make_disk()
    fill(manager, PROMPT).close()
    push_down(manager)
    manager = make_disk()
    (path,) = (tmp_path / "kv").glob("group0-*")
    content = bytearray(path.read_bytes())
    record = len(content) // 40
    whole = disk_counts(manager).kept
    for start in range(0, len(content), record):
        payload = start + 64
        if damage == "cut":  # the second half was never written
            content[start + record // 2 : start + record] = bytes(record - record // 2)
        elif damage == "flip":
            content[payload] ^= 1
        else:  # bytes of another block under this one's header
            content[payload : start + record] = bytes([start % 251 + 1]) * (record - 64)
    path.write_bytes(content)
    cache = manager.open("", PROMPT, max_reuse=20)
    assert cache.reused == 0
    assert disk_counts(manager).kept < whole, "the record is not tried again"
    manager.check_integrity()


def test_a_prefix_is_served_up_to_a_torn_block(make_disk: MakeDisk, tmp_path: Path) -> None:
    manager = make_disk()
    fill(manager, PROMPT).close()
    push_down(manager)
    third = block_digests("", PROMPT, SIZE)[2]
    manager = make_disk()
    (path,) = (tmp_path / "kv").glob("group0-*")
    content = bytearray(path.read_bytes())
    content[content.index(third) + 60] ^= 255
    path.write_bytes(content)
    assert manager.match("", PROMPT) == 20
    cache = manager.open("", PROMPT, max_reuse=20)
    assert cache.reused == 8
    assert_written(manager, cache, PROMPT)
    assert manager.match("", PROMPT) == 8


def test_clear_reuse_forgets_the_disk_too(make_disk: MakeDisk) -> None:
    manager = make_disk()
    fill(manager, PROMPT).close()
    push_down(manager)
    manager.clear_reuse()
    assert manager.match("", PROMPT) == 0
    assert disk_counts(manager).free == disk_counts(manager).total


def test_a_small_host_tier_brings_up_what_it_can_hold(make_disk: MakeDisk) -> None:
    manager = make_disk(host=2)
    fill(manager, PROMPT).close()
    push_down(manager)
    cache = manager.open("", PROMPT, max_reuse=20)
    assert cache.reused == 8
    assert_written(manager, cache, PROMPT)
    manager.check_integrity()


def test_a_folder_belongs_to_one_manager(make_disk: MakeDisk, tmp_path: Path) -> None:
    make_disk()
    with pytest.raises(ConfigError, match="in use by another worker") as caught:
        create_manager("V2", [FULL], 1 << 12, host_bytes=1 << 12, disk_bytes=1 << 12, disk_dir=tmp_path / "kv")
    assert caught.value.field == "kv_cache.disk_dir"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"disk_bytes": 1 << 20, "disk_dir": Path("x")}, "kv_cache.host_bytes"),
        ({"disk_bytes": 1 << 20, "host_bytes": 1 << 20}, "kv_cache.disk_dir"),
        ({"disk_bytes": 1, "host_bytes": 1 << 20, "disk_dir": Path("/proc/none")}, "kv_cache.disk_bytes"),
        ({"disk_bytes": 1 << 20, "host_bytes": 1 << 20, "disk_dir": Path("/proc/none")}, "kv_cache.disk_dir"),
    ],
)
def test_a_disk_tier_that_cannot_be_is_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_manager("V2", [FULL], 1 << 20, **settings)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_disk_tier_larger_than_its_disk_is_refused_with_what_there_is(tmp_path: Path) -> None:
    whole = shutil.disk_usage(tmp_path).total
    options: dict[str, Any] = {"host_bytes": 1 << 12, "disk_bytes": whole + 1, "disk_dir": tmp_path}
    with pytest.raises(ConfigError, match=rf"disk_bytes is {whole + 1}, .* has {whole} bytes in all") as caught:
        create_manager("V2", [FULL], 1 << 12, **options)
    assert caught.value.field == "kv_cache.disk_bytes"
    options["disk_bytes"] = 1 << 12  # the folder was given back
    create_manager("V2", [FULL], 1 << 12, **options).close()


def test_a_limit_on_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier.resource, "getrlimit", lambda which: (1000, 1000))
    with pytest.raises(ConfigError, match=r"may have 1000 bytes \(ulimit -f\)") as caught:
        create_manager("V2", [FULL], 1 << 12, host_bytes=1 << 12, disk_bytes=1 << 12, disk_dir=tmp_path)
    assert caught.value.field == "kv_cache.disk_bytes"


@pytest.mark.parametrize("pwrite", [no_space, half])
def test_what_a_full_disk_did_not_take_is_a_miss(
    make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch, pwrite: Callable[[int, bytes, int], int]
) -> None:
    monkeypatch.setattr(os, "pwrite", pwrite)
    manager = make_disk()
    fill(manager, PROMPT).close()
    push_down(manager)
    for shelf in manager._books.host._disk.shelves:  # type: ignore[attr-defined]
        shelf._writer.submit(int).result()
        shelf._forget_written()
    assert disk_counts(manager).kept == 0
    cache = manager.open("", PROMPT, max_reuse=20)
    assert cache.reused == 0
    assert manager.match("", PROMPT) == 0
    manager.check_integrity()
    cache.close()
    monkeypatch.undo()  # there is room again
    fill(manager, PROMPT).close()
    fill(manager, [9] * 24, scope="filler").close()
    push_down(manager)
    assert manager.open("", PROMPT, max_reuse=20).reused == 20


@pytest.fixture
def writer() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


def row(number: int, nbytes: int = 32) -> torch.Tensor:
    return torch.full((nbytes,), number, dtype=torch.uint8)


def test_writes_never_hold_up_the_caller_and_are_skipped_when_too_many_wait(
    tmp_path: Path, writer: ThreadPoolExecutor
) -> None:
    shelf = DiskShelf(tmp_path / "s", 32, 4 * MAX_PENDING_WRITES, writer, writer, None)
    go_on = threading.Event()
    writer.submit(go_on.wait, 30)
    digests = [bytes([n]) * 32 for n in range(MAX_PENDING_WRITES + 1)]
    for number, digest in enumerate(digests):
        shelf.keep(digest, row(number))
    assert shelf.read(digests[7]) == bytes([7]) * 32, "served from memory while it is being written"
    assert digests[-1] not in shelf
    go_on.set()
    writer.submit(int).result()
    shelf.keep(digests[-1], row(1))
    assert shelf.read(digests[7]) == bytes([7]) * 32, "and from the file afterwards"
    assert digests[-1] in shelf
    shelf.check_integrity()


def test_the_least_recently_used_record_makes_room(tmp_path: Path, writer: ThreadPoolExecutor) -> None:
    shelf = DiskShelf(tmp_path / "s", 32, 2, writer, writer, None)
    digests = [bytes([n]) * 32 for n in range(3)]
    shelf.keep(digests[0], row(0))
    shelf.keep(digests[1], row(1))
    shelf.keep(digests[0], row(0))
    shelf.keep(digests[2], row(2))
    assert [digest in shelf for digest in digests] == [True, False, True]
    writer.submit(int).result()
    assert shelf.read(digests[2]) == bytes([2]) * 32
    assert shelf.read(digests[0]) == bytes(32)
    shelf.check_integrity()


def test_parked_records_end_with_the_process(tmp_path: Path, writer: ThreadPoolExecutor) -> None:
    path = tmp_path / "s"
    shelf = DiskShelf(path, 32, 4, writer, writer, None)
    key = shelf.park(row(3))
    shelf.keep(bytes([1]) * 32, row(1))
    assert (shelf.parked, shelf.kept, shelf.room) == (1, 1, 3)
    assert shelf.pending_parked_nbytes in (0, 32)
    writer.submit(int).result()
    assert shelf.pending_parked_nbytes == 0
    assert shelf.read_parked(key) == bytes([3]) * 32
    again = DiskShelf(path, 32, 4, writer, writer, None)
    assert (again.parked, again.kept) == (0, 1)
    shelf.unpark(key)
    shelf.check_integrity()


@pytest.mark.parametrize("at_a_time", [1, 2, 64])
def test_what_a_request_will_need_is_read_ahead_on_another_thread(
    make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(disk_tier, "MAX_FETCHED", at_a_time)
    manager = make_disk()
    fill(manager, PROMPT).close()
    push_down(manager)
    manager = make_disk()  # nothing waits to be written any more, and nothing is in memory
    go_on, threads = threading.Event(), []
    read_file = DiskShelf._read_file

    def slowly(shelf: DiskShelf, slot: int, kind: Kind, digest: bytes) -> bytes | None:
        threads.append(threading.current_thread().name)
        go_on.wait(30)
        return read_file(shelf, slot, kind, digest)

    monkeypatch.setattr(DiskShelf, "_read_file", slowly)
    assert not manager.prefetch("", PROMPT)
    assert not manager.prefetch("", PROMPT), "asking again starts nothing anew"
    go_on.set()
    deadline = time.monotonic() + 20
    while not manager.prefetch("", PROMPT):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    read = len(threads)
    again = manager.open("", PROMPT, max_reuse=20)
    assert again.reused == 20
    assert_written(manager, again, PROMPT)
    assert len(threads) == read
    assert all(name.startswith("kv-disk-read") for name in threads)
    assert manager.prefetch("", [1] * 20), "nothing of this is on disk"
    manager.check_integrity()


def test_a_record_overwritten_before_it_was_read_is_not_served(tmp_path: Path, writer: ThreadPoolExecutor) -> None:
    with ThreadPoolExecutor(max_workers=1) as reader:
        shelf = DiskShelf(tmp_path / "s", 32, 1, writer, reader, None)
        first, second = bytes([1]) * 32, bytes([2]) * 32
        shelf.keep(first, row(1))
        writer.submit(int).result()
        shelf._forget_written()
        go_on = threading.Event()
        reader.submit(go_on.wait, 30)
        assert not shelf.fetch(first)
        shelf.keep(second, row(2))  # takes the only slot
        shelf.keep(first, row(1))
        writer.submit(int).result()
        writer.submit(shelf._write, 0, Kind.BLOCK, second, bytes([2]) * 32).result()
        go_on.set()
        shelf._forget_written()
        assert shelf.read(first) is None, "the slot holds another block by then"
        assert first not in shelf
        shelf.check_integrity()
