"""The memory of the pools: how it is sized, laid out and claimed. The only part of the folder that touches bytes."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.core import AxisOrder, ConfigError, KVLayout
from kvferry.kvcache.base import KVPool
from kvferry.kvcache.page_log import PageChange, PageLog
from kvferry.kvcache.slot_copies import copy_slots

Allocate = Callable[[int], torch.Tensor]
"""Bytes -> uint8 tensor, zero-filled and page-aligned: where pools live, when a transceiver needs to say so."""

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 << 20
MIN_BLOCKS_PER_STATE = 16
_CANARY_BYTE = 0xA5
_CANARY_PAGE = bytes([_CANARY_BYTE]) * PAGE_NBYTES
_NAN_BYTE = 0xFF  # all bits set is a NaN in every floating type we store


def blocks_for_budget(
    layouts: Sequence[KVLayout], nbytes: int, setting: str = "kv_cache.bytes", typical_tokens: int | None = None
) -> int:
    """Blocks every attention group gets: with equal counts no group runs out before the one that keeps all tokens.
    State groups get a slot for every `blocks_per_state` of them.

    Raises ConfigError naming `setting` when not even one block of each fits.
    """
    row_nbytes, state_nbytes = _row_and_state_nbytes(layouts)
    per_state = blocks_per_state(layouts, typical_tokens)
    num_blocks = nbytes * per_state // (per_state * row_nbytes + state_nbytes)
    while num_blocks and num_blocks * row_nbytes + state_slots(num_blocks, per_state) * state_nbytes > nbytes:
        num_blocks -= 1
    if num_blocks < 1:
        least = row_nbytes + state_slots(1, per_state) * state_nbytes
        raise ConfigError(
            f"{setting} is {nbytes}, but one block of {layouts[0].tokens_per_block} tokens takes {least} "
            f"bytes over {len(layouts)} layer group(s): raise {setting} to at least {least}",
            field=setting,
        )
    return num_blocks


def _row_and_state_nbytes(layouts: Sequence[KVLayout]) -> tuple[int, int]:
    """What a block takes in all attention groups together, and a state in all state groups."""
    row = sum(layout.slot_nbytes for layout in layouts if not layout.kind.is_state)
    return row, sum(layout.slot_nbytes for layout in layouts if layout.kind.is_state)


def blocks_per_state(layouts: Sequence[KVLayout], typical_tokens: int | None) -> int:
    """How many blocks there are for each slot of the state groups.

    A typical request has a live state and as many snapshots as take no more memory than its blocks do: one at least, so
    that its prefix can be reused, and no more than one state for every MIN_BLOCKS_PER_STATE blocks, which is how far
    snapshots are apart by default. typical_tokens None: that many states, however large they are.
    """
    row_nbytes, state_nbytes = _row_and_state_nbytes(layouts)
    if typical_tokens is None or not state_nbytes:
        return MIN_BLOCKS_PER_STATE
    size = next(layout.tokens_per_block for layout in layouts if not layout.kind.is_state)
    blocks = -(-typical_tokens // size)
    states = min(1 + blocks * row_nbytes // state_nbytes, blocks // MIN_BLOCKS_PER_STATE)
    return max(1, blocks // max(2, states))


def state_slots(num_blocks: int, per_state: int) -> int:
    """Slots of a state group beside `num_blocks` blocks of attention; two at least, a live state and a snapshot."""
    return max(2, -(-num_blocks // per_state))


def slot_counts(layouts: Sequence[KVLayout], num_blocks: int, typical_tokens: int | None = None) -> list[int]:
    states = state_slots(num_blocks, blocks_per_state(layouts, typical_tokens))
    return [states if layout.kind.is_state else num_blocks for layout in layouts]


def withheld_blocks(
    layouts: Sequence[KVLayout], nbytes: int, num_blocks: int, typical_tokens: int | None = None
) -> int:
    """How many of each pool's `num_blocks` blocks a quota of `nbytes` leaves unused. Raises ConfigError."""
    blocks = blocks_for_budget(layouts, nbytes, typical_tokens=typical_tokens)
    if blocks > num_blocks:
        raise ConfigError(
            f"kv_cache.bytes cannot grow to {nbytes} while serving: that is {blocks} blocks per layer group, and the "
            f"pools were made for {num_blocks}",
            field="kv_cache.bytes",
        )
    return num_blocks - blocks


def build_pool(
    layout: KVLayout,
    num_blocks: int,
    device: str,
    allocate: Allocate | None = None,
    guard: bool = False,
    shared: Buffer | None = None,
) -> KVPool:
    """A zero-filled pool: what attention masks out must be finite. Generations stay in host memory, where the
    engine raises them without a kernel launch. allocate: None is plain memory of `device`. guard: see `Buffer`.
    shared: the buffer it lies in, from its start, with the pools of other groups."""
    take_host = allocate or (lambda nbytes: _aligned_zeros(nbytes, "cpu"))
    nbytes = num_blocks * layout.slot_nbytes
    memory = shared or build_buffer(nbytes, device, allocate, guard)
    buffer = memory.body[:nbytes]
    inner = (layout.kv_heads, layout.tokens_per_block)
    if layout.axis_order is AxisOrder.TOKEN_HEAD:
        inner = (layout.tokens_per_block, layout.kv_heads)
    row_elements = layout.row_nbytes // layout.dtype.nbytes
    shape = (num_blocks, len(layout.layers), layout.planes, *inner, row_elements)
    return KVPool(
        layout=layout,
        num_blocks=num_blocks,
        buffer=buffer,
        view=buffer.view(getattr(torch, layout.dtype.value)).view(shape),
        generations=take_host(num_blocks * 8).view(torch.int64),
        guards=memory.guards,
    )


@dataclass(frozen=True, slots=True)
class Buffer:
    """body: uint8, zero-filled and page-aligned. guards: pages of canaries before and behind it, where asked for.

    Canaries rather than pages without access: they work in the memory of any device or transceiver, and tell which pool
    was overrun instead of ending the process.
    """

    body: torch.Tensor
    guards: tuple[torch.Tensor, ...] = ()


def build_buffer(nbytes: int, device: str, allocate: Allocate | None, guard: bool) -> Buffer:
    if allocate is not None and device != "cpu":
        raise ConfigError(
            f"the transceiver keeps block pools in host memory, but engine.device is {device}: set engine.device to "
            "cpu, or another transceiver.backend",
            field="engine.device",
        )
    take = allocate or (lambda nbytes: _aligned_zeros(nbytes, device))
    if not guard:
        return Buffer(take(nbytes))
    whole = take(nbytes + 2 * PAGE_NBYTES)
    guards = (whole[:PAGE_NBYTES], whole[PAGE_NBYTES + nbytes :])
    for page in guards:
        page.fill_(_CANARY_BYTE)
    return Buffer(whole[PAGE_NBYTES : PAGE_NBYTES + nbytes], guards)


def _aligned_zeros(nbytes: int, device: str) -> torch.Tensor:
    """Page-aligned, because memory is registered for remote access by the page."""
    raw = allocate_zeros(nbytes + PAGE_NBYTES, device, "kv_cache.bytes")
    offset = -raw.data_ptr() % PAGE_NBYTES
    return raw[offset : offset + nbytes]


def allocate_zeros(nbytes: int, device: str, setting: str) -> torch.Tensor:
    """uint8 [nbytes]. Raises ConfigError naming `setting` where the device has too little memory."""
    huge = device == "cpu" and nbytes >= HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE")
    try:
        return _zeros_in_huge_pages(nbytes) if huge else torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{setting} asks for {nbytes} bytes of {device} memory, which cannot be had: lower it ({reason})",
            field=setting,
        ) from None


def allocate_host_zeros(nbytes: int, device: str, setting: str) -> torch.Tensor:
    """As `allocate_zeros` in host memory, for copies from and to `device`: a GPU reads only pinned memory by itself."""
    if torch.device(device).type != "cuda":
        return allocate_zeros(nbytes, "cpu", setting)
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{setting} asks for {nbytes} bytes of pinned host memory, which cannot be had: lower it ({reason})",
            field=setting,
        ) from None


def _zeros_in_huge_pages(nbytes: int) -> torch.Tensor:
    """Where the system has some: what a decoding sequence reads is scattered over the pool, a few KiB here and there,
    and of small pages each would have to be looked up."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Pages:
    """What bookkeeping may do to the memory of a worker's pools."""

    def __init__(self, pools: Sequence[KVPool], debug: bool, log: PageLog | None = None) -> None:
        """debug: fresh pages are filled with NaN, so that reading what was never written cannot go unnoticed.
        log: where changes are noted for other ranks."""
        self.pools = tuple(pools)
        self._generations = [pool.generations.numpy() for pool in pools]
        self._rows = [pool.buffer.view(pool.num_blocks, pool.layout.slot_nbytes) for pool in pools]
        self._debug = debug
        self._log = log

    def rows(self, group: int) -> torch.Tensor:
        """The pool of `group` as uint8 [num_blocks, slot_nbytes]."""
        return self._rows[group]

    def write(self, group: int, slots: Sequence[int], rows: torch.Tensor, sources: Sequence[int]) -> None:
        """Copies rows of another tier to claimed slots."""
        copy_slots(self._rows[group], slots, rows, sources)

    def copy(self, group: int, source: int, slot: int) -> None:
        rows = self._rows[group]
        rows[slot] = rows[source]
        self._note(PageChange.COPY, group, (source, slot))

    def zero(self, group: int, slot: int) -> None:
        self._rows[group][slot] = 0
        self._note(PageChange.ZERO, group, (slot,))

    def _note(self, change: PageChange, group: int, slots: Sequence[int]) -> None:
        if self._log is not None:
            self._log.note(change, group, slots)

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
        self._note(PageChange.CLAIM, group, slots)

    def check_integrity(self) -> None:
        """Raises AssertionError when something was written beyond a pool. Only in debug mode is there a way to tell."""
        for group, pool in enumerate(self.pools):
            for side, page in zip(("before", "behind"), pool.guards, strict=False):
                assert page.cpu().numpy().tobytes() == _CANARY_PAGE, (
                    f"memory {side} the pool of layer group {group} was written"
                )

    def generations(self, group: int, slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._generations[group][list(slots)].tolist())
