"""What becomes of a write when the disk is full: stand-ins for `os.pwrite`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable


def no_space(file: int, record: bytes, at: int) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def half(file: int, record: bytes, at: int, write: Callable[[int, bytes, int], int] = os.pwrite) -> int:
    """What the system does when the disk is full in the middle of a write, or the process is killed there."""
    return write(file, record[: len(record) // 2], at)
