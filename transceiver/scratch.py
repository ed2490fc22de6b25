"""Small registered buffers that generation words are read into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core import MemRegion
from kvferry.transceiver.base import Agent

_WORD_NBYTES = 8
_SMALLEST_WORDS = 64


@dataclass(frozen=True, slots=True, eq=False)
class ScratchBlock:
    """Room for `len(words)` u64. Its owner gives it back once no operation can write to it."""

    words: npt.NDArray[np.uint64]
    region: MemRegion


class Scratch:
    """Hands out registered blocks in power-of-two sizes and keeps returned ones for reuse: registering costs far
    more than reading. Used by the agent thread only. Blocks live until the agent is closed."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._free: dict[int, list[ScratchBlock]] = {}

    def take(self, words: int) -> ScratchBlock:
        size = max(_SMALLEST_WORDS, 1 << (words - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        array = np.zeros(size, dtype=np.uint64)
        region = MemRegion(addr=array.ctypes.data, nbytes=size * _WORD_NBYTES)
        self._agent.register(region)
        return ScratchBlock(array, region)

    def give(self, block: ScratchBlock) -> None:
        self._free[len(block.words)].append(block)
