"""Shared pool memory: what it promises to pools, and to peers that map it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.core import ConfigError, MemRegion
from kvferry.transceiver import memory
from kvferry.transceiver.memory import SharedArena


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    made = SharedArena()
    yield made
    made.close()


def test_memory_is_zero_page_aligned_and_seen_by_whoever_maps_its_file(arena: SharedArena) -> None:
    first, second = arena.allocate(5000), arena.allocate(8)
    assert (first.dtype, first.shape, second.shape) == (torch.uint8, (5000,), (8,))
    assert first.data_ptr() % mmap.PAGESIZE == second.data_ptr() % mmap.PAGESIZE == 0
    assert not first.any()
    first[4999] = 42
    with mmap.mmap(arena.segments[0].fd, 0) as elsewhere:
        assert elsewhere[4999] == 42


def test_segments_are_found_by_what_lies_in_them(arena: SharedArena) -> None:
    first, second = arena.allocate(5000), arena.allocate(8)
    assert arena.segment_of(MemRegion(first.data_ptr() + 16, 100)) is arena.segments[0]
    assert arena.segment_of(MemRegion(second.data_ptr(), 8)) is arena.segments[1]
    end = arena.segments[0].region.addr + arena.segments[0].region.nbytes
    assert arena.segment_of(MemRegion(end - 8, 16)) is None
    assert arena.segment_of(MemRegion(1, 1)) is None


def test_a_file_cannot_be_shrunk_under_its_readers(arena: SharedArena) -> None:
    arena.allocate(5000)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.segments[0].fd, 0)


def test_more_than_there_is_names_the_setting(arena: SharedArena) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"lower kv_cache\.bytes") as caught:
        arena.allocate(1 << 62)
    assert caught.value.field == "kv_cache.bytes"
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("max", "0", 4096 * 1024), ("1000000", "400000", 600_000), ("1000", "5000", 0)]
)
def test_a_container_has_what_its_control_group_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4096 kB\n")
    (tmp_path / "own").write_text("1:cpu:/old\n0::/pod/worker\n")
    group = tmp_path / "groups" / "pod" / "worker"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text(used + "\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    assert memory.available_nbytes() == expected


def test_nothing_has_a_name_and_close_lets_go_of_the_files() -> None:
    arena = SharedArena()
    kept = arena.allocate(4096)
    assert [path for path in Path("/dev/shm").iterdir() if "kvferry" in path.name] == []
    fd = arena.segments[0].fd
    assert os.fstat(fd).st_nlink == 0
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    kept[0] = 1  # whoever still holds it may go on using it
    assert int(kept[0]) == 1
