"""Where a worker's block pools live, when a backend needs them in memory of its own kind."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry.core import ConfigError, MemRegion

_PAGE_NBYTES = mmap.PAGESIZE
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolMemory(ABC):
    """Hands out the memory that pools are built in. Its tensors stay valid for as long as anyone holds them."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], zero-filled, starting on a page. Raises ConfigError when there is not that much."""

    @abstractmethod
    def close(self) -> None:
        """Peers can no longer reach it. After the transceiver's own close."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedSegment:
    """One memory file and where it is mapped here. `pages` keeps the mapping, and with it the address, in use."""

    region: MemRegion
    fd: int
    pages: torch.Tensor


class SharedArena(PoolMemory):
    """Anonymous memory files: no name in any file system, so nothing is left behind however a worker ends.

    Sealed against resizing, because a peer that reads beyond a shrunken file would die of it.
    """

    def __init__(self) -> None:
        self._segments: list[SharedSegment] = []

    @property
    def segments(self) -> tuple[SharedSegment, ...]:
        return tuple(self._segments)

    def allocate(self, nbytes: int) -> torch.Tensor:
        size = max(_PAGE_NBYTES, -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES)
        available = available_nbytes()
        if size > available:
            raise _too_much(size, f"{available} are available")
        fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Claims the pages now: later, a machine out of memory would kill whoever touches them first.
            # The kernel does not refuse here either, hence the question before.
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(fd)
            raise _too_much(size, str(error)) from None
        pages = torch.frombuffer(mapping, dtype=torch.uint8)
        self._segments.append(SharedSegment(MemRegion(pages.data_ptr(), size), fd, pages))
        return pages[:nbytes]

    def segment_of(self, region: MemRegion) -> SharedSegment | None:
        """The segment that holds all of `region`."""
        for segment in self._segments:
            offset = region.addr - segment.region.addr
            if 0 <= offset <= segment.region.nbytes - region.nbytes:
                return segment
        return None

    def close(self) -> None:
        segments, self._segments = self._segments, []
        for segment in segments:
            with contextlib.suppress(OSError):
                os.close(segment.fd)


def available_nbytes() -> int:
    """What this machine could give without swapping, as its kernel estimates it, and what this process's control
    group has left: in a container the latter is what decides."""
    machine = next(
        (int(line.split()[1]) * 1024 for line in _lines(_MEMINFO) if line.startswith("MemAvailable:")), _UNLIMITED
    )
    group = next((line.removeprefix("0::/") for line in _lines(_OWN_GROUP) if line.startswith("0::/")), "")
    limit = _number(_GROUPS / group / "memory.max", _UNLIMITED)
    return min(machine, max(0, limit - _number(_GROUPS / group / "memory.current", 0)))


def _number(path: Path, otherwise: int) -> int:
    """`max`, and a file that is not there, mean no limit."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdigit() else otherwise


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _too_much(size: int, reason: str) -> ConfigError:
    return ConfigError(
        f"a block pool of {size} bytes in shared memory: {reason}; lower kv_cache.bytes", field="kv_cache.bytes"
    )
