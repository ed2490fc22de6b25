"""Memory for packed weights, in huge pages where the system has them.

Decoding reads every weight once per step, and with pages of 4 KB a third of that time goes into translating
addresses.
"""

from __future__ import annotations

import torch

from kvferry.engine.native import kernels

_HUGE_PAGE_NBYTES = 2 << 20
_CHUNK_NBYTES = 16 * _HUGE_PAGE_NBYTES
_LINE_NBYTES = 64


class WeightMemory:
    """Hands out pieces of large chunks. A chunk lives as long as any of its pieces; pieces are never reused, so
    one of these serves one model."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], uninitialised, starting at a cache line."""
        wanted = -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES
        if self._used + wanted > len(self._chunk):
            self._chunk, self._used = _huge_chunk(max(wanted, _CHUNK_NBYTES)), 0
        piece = self._chunk[self._used : self._used + nbytes]
        self._used += wanted
        return piece


def _huge_chunk(nbytes: int) -> torch.Tensor:
    """A whole number of huge pages. Those never touched cost nothing."""
    rounded = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    raw = torch.empty(rounded + _HUGE_PAGE_NBYTES, dtype=torch.uint8)
    chunk = raw[-raw.data_ptr() % _HUGE_PAGE_NBYTES :][:rounded]
    kernels.advise_huge(chunk.data_ptr(), rounded)
    return chunk
