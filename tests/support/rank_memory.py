"""The pools of ranks as numpy arrays, for plans that are executed over real memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core import AxisOrder, BlockTable, KVLayout, MemRegion, RankInfo, Resolution, Role, Source
from kvferry.transceiver.base import CopyArray
from kvferry.transceiver.planner import RankTables

RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "test")


class Pool:
    """One group's memory: random bytes, generations (1000 + block), and one request's table."""

    def __init__(self, layout: KVLayout, ids: Sequence[int], blocks: int, seed: int, first_block: int = 0) -> None:
        self.layout = layout
        self.bytes = np.random.default_rng(seed).integers(0, 256, blocks * layout.slot_nbytes, dtype=np.uint8)
        self.generations = np.arange(1000, 1000 + blocks, dtype=np.uint64)
        self.table = BlockTable(tuple(ids), tuple(int(self.generations[block]) for block in ids), first_block)

    @property
    def region(self) -> MemRegion:
        return MemRegion(self.bytes.ctypes.data, self.bytes.nbytes)

    @property
    def generation_region(self) -> MemRegion:
        return MemRegion(self.generations.ctypes.data, self.generations.nbytes)

    @property
    def view(self) -> NDArray[np.uint8]:
        """The memory itself: [block, token, layer, plane, head, row bytes]."""
        layout = self.layout
        by_head = layout.axis_order is AxisOrder.HEAD_TOKEN
        inner = (layout.kv_heads, layout.tokens_per_block) if by_head else (layout.tokens_per_block, layout.kv_heads)
        shaped = self.bytes.reshape(-1, len(layout.layers), layout.planes, *inner, layout.row_nbytes)
        return shaped.transpose((0, 4, 1, 2, 3, 5) if by_head else (0, 3, 1, 2, 4, 5))

    def sequence(self) -> NDArray[np.uint8]:
        """A copy of the table's bytes by position, from first_block on: [position, layer, plane, head, row bytes]."""
        blocks = self.view[list(self.table.block_ids)]
        return blocks.reshape(-1, *blocks.shape[2:])

    def write(self, start: int, rows: NDArray[np.uint8]) -> None:
        """Puts `rows` (as `sequence` gives them) at the positions from `start` on."""
        for position, row in enumerate(rows, start):
            self.view[self.block_at(position), position % self.layout.tokens_per_block] = row

    def block_at(self, position: int) -> int:
        """The block that holds a position; of a state, its live slot."""
        if self.layout.kind.is_state:
            return self.table.block_ids[-1]
        return self.table.block_ids[position // self.layout.tokens_per_block - self.table.first_block]


def side(
    name: str,
    pools: Sequence[Pool],
    *,
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
) -> RankTables:
    """A rank with these pools. tp, pp: (rank, size)."""
    rank = RankInfo(
        worker=name,
        role=Role.PREFILL,
        incarnation=f"{name}-{tp[0]}-{pp[0]}",
        endpoint="here:1",
        model_fingerprint="model",
        resolution=RESOLUTION,
        layouts=tuple(pool.layout for pool in pools),
        pools=tuple(pool.region for pool in pools),
        generations=tuple(pool.generation_region for pool in pools),
        agent_metadata=b"",
        handle_key=b"k",
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
    )
    return RankTables(rank, tuple(pool.table for pool in pools))


def execute(copies: CopyArray) -> None:
    """Copies [to, from, bytes]."""
    for to, origin, nbytes in copies.tolist():
        ctypes.memmove(to, origin, nbytes)


def overlaps(starts: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> bool:
    order = np.argsort(starts)
    return bool(np.any(starts[order][1:] < (starts + nbytes)[order][:-1]))
