"""Copying between two mappings of this process."""

from __future__ import annotations

import ctypes

from kvferry.transceiver.base import CopyArray


def copy_runs(copies: CopyArray) -> None:
    """Copies each row's `[destination, source, bytes]`, in order. Runs of one row must not overlap. Addresses are
    trusted: check them first. Other threads run meanwhile."""
    for destination, source, nbytes in copies.tolist():
        ctypes.memmove(destination, source, nbytes)  # releases the GIL
