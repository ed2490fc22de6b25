"""The memory of the pools: how it is sized, laid out and claimed. The only part of the folder that touches bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvferry.core import AxisOrder, ConfigError, KVLayout
from kvferry.kvcache.base import KVPool

Allocate = Callable[[int], torch.Tensor]
"""Bytes -> uint8 tensor, zero-filled and page-aligned: where pools live, when a transceiver needs to say so."""

PAGE_NBYTES = 4096
_NAN_BYTE = 0xFF  # all bits set is a NaN in every floating type we store


def blocks_for_budget(layouts: Sequence[KVLayout], nbytes: int) -> int:
    """Blocks every layer group gets: with equal counts no group runs out before the one that keeps all tokens.

    Raises ConfigError naming `kv_cache.bytes` when not even one block of each fits.
    """
    row_nbytes = sum(layout.slot_nbytes for layout in layouts)
    num_blocks = nbytes // row_nbytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache.bytes is {nbytes}, but one block of {layouts[0].tokens_per_block} tokens takes {row_nbytes} "
            f"bytes over {len(layouts)} layer group(s): raise kv_cache.bytes to at least {row_nbytes}",
            field="kv_cache.bytes",
        )
    return num_blocks


def build_pool(layout: KVLayout, num_blocks: int, device: str, allocate: Allocate | None = None) -> KVPool:
    """A zero-filled pool: what attention masks out must be finite. Generations stay in host memory, where the
    engine raises them without a kernel launch. allocate: None is plain memory of `device`."""
    if allocate is not None and device != "cpu":
        raise ConfigError(
            f"the transceiver keeps block pools in host memory, but engine.device is {device}: set engine.device to "
            "cpu, or another transceiver.backend",
            field="engine.device",
        )
    take = allocate or (lambda nbytes: _aligned_zeros(nbytes, device))
    take_host = allocate or (lambda nbytes: _aligned_zeros(nbytes, "cpu"))
    buffer = take(num_blocks * layout.slot_nbytes)
    inner = (layout.kv_heads, layout.tokens_per_block)
    if layout.axis_order is AxisOrder.TOKEN_HEAD:
        inner = (layout.tokens_per_block, layout.kv_heads)
    shape = (num_blocks, len(layout.layers), layout.planes, *inner, layout.head_dim)
    return KVPool(
        layout=layout,
        num_blocks=num_blocks,
        buffer=buffer,
        view=buffer.view(getattr(torch, layout.dtype.value)).view(shape),
        generations=take_host(num_blocks * 8).view(torch.int64),
    )


def _aligned_zeros(nbytes: int, device: str) -> torch.Tensor:
    """Page-aligned, because memory is registered for remote access by the page."""
    raw = torch.zeros(nbytes + PAGE_NBYTES, dtype=torch.uint8, device=device)
    offset = -raw.data_ptr() % PAGE_NBYTES
    return raw[offset : offset + nbytes]


class Pages:
    """What bookkeeping may do to the memory of a worker's pools."""

    def __init__(self, pools: Sequence[KVPool], debug: bool) -> None:
        """debug: fresh pages are filled with NaN, so that reading what was never written cannot go unnoticed."""
        self.pools = tuple(pools)
        self._generations = [pool.generations.numpy() for pool in pools]
        self._rows = [pool.buffer.view(pool.num_blocks, pool.layout.slot_nbytes) for pool in pools]
        self._debug = debug

    def claim(self, group: int, slots: Sequence[int]) -> None:
        """`slots` get a new owner: their generations rise before anything of theirs is overwritten, so that a
        remote reader who still trusts the old content can tell."""
        generations = self._generations[group]
        if len(slots) == 1:  # the common case of a decode step, four times faster than indexing by list
            generations[slots[0]] += 1
        else:
            generations[list(slots)] += 1
        if self._debug:
            self._rows[group][list(slots)] = _NAN_BYTE

    def generations(self, group: int, slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._generations[group][list(slots)].tolist())
