"""Chunks, sinks and single-plane caches: paged attention equals the textbook, over pages full of NaN."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvferry.core import AxisOrder, GroupKind, KVLayout
from kvferry.engine.attention import PagedAttention
from kvferry.engine.spans import AttentionChunk, lowest_attended
from kvferry.kvcache import KVPool

HEADS, DIM, BLOCK, BLOCKS, SCALE = 6, 16, 8, 64, 0.3
LENGTHS = (90, 61, 20)
STEPS = [
    [(0, 0, 50), (1, 0, 1), (2, 0, 13)],
    [(0, 50, 71), (1, 1, 30), (2, 13, 14)],
    [(0, 71, 72), (1, 30, 60), (2, 14, 20)],
    [(0, 72, 73), (1, 60, 61)],
    [(0, 73, 90)],
]
"""(sequence, start, stop): first chunks, later ones and single tokens, in and across blocks, windows and chunks."""

LAYOUTS = {
    "full": KVLayout(GroupKind.FULL, (0, 1), 2, DIM, tokens_per_block=BLOCK),
    "window": KVLayout(GroupKind.WINDOW, (0, 1), 2, DIM, tokens_per_block=BLOCK, window=11),
    "chunked": KVLayout(GroupKind.CHUNKED, (0, 1), 2, DIM, tokens_per_block=BLOCK, window=20),
    "chunked-token-head": KVLayout(
        GroupKind.CHUNKED, (0, 1), 2, DIM, tokens_per_block=BLOCK, window=12, axis_order=AxisOrder.TOKEN_HEAD
    ),
    "mla": KVLayout(GroupKind.MLA, (0, 1), 1, DIM, tokens_per_block=BLOCK, planes=1),
    "mla-token-head": KVLayout(
        GroupKind.MLA, (0, 1), 1, DIM, tokens_per_block=BLOCK, planes=1, axis_order=AxisOrder.TOKEN_HEAD
    ),
}


def nan_pool(layout: KVLayout) -> KVPool:
    buffer = torch.full((BLOCKS * layout.slot_nbytes,), 0xFF, dtype=torch.uint8)
    heads_first = layout.axis_order is AxisOrder.HEAD_TOKEN
    inner = (layout.kv_heads, BLOCK) if heads_first else (BLOCK, layout.kv_heads)
    view = buffer.view(torch.float32).view(BLOCKS, len(layout.layers), layout.planes, *inner, DIM)
    return KVPool(layout, BLOCKS, buffer, view, torch.zeros(BLOCKS, dtype=torch.int64))


def textbook(
    layout: KVLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q: the tokens from `start` on; k, v: all up to the last of them."""
    share, stop = HEADS // layout.kv_heads, len(k)
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    for row, position in enumerate(range(start, stop)):
        if layout.kind is GroupKind.CHUNKED:
            assert layout.window is not None
            allowed = [key <= position and key // layout.window == position // layout.window for key in range(stop)]
        else:
            allowed = [key <= position and position - key < (layout.window or stop) for key in range(stop)]
        scores[:, row, ~torch.tensor(allowed)] = float("-inf")
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp().view(-1, 1, 1))
    return torch.einsum("hqk,khd->qhd", weights / total, v)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_step_equals_the_textbook(name: str, with_sinks: bool) -> None:
    layout = LAYOUTS[name]
    generator = torch.Generator().manual_seed(5)
    sinks = torch.randn(HEADS, generator=generator) if with_sinks else None
    pool = nan_pool(layout)
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    tables = [order[20 * i : 20 * i + -(-length // BLOCK)] for i, length in enumerate(LENGTHS)]
    q, k, v = (
        [torch.randn(2, length, heads, DIM, generator=generator) for length in LENGTHS]
        for heads in (HEADS, layout.kv_heads, layout.kv_heads)
    )
    if layout.planes == 1:
        v = k
    for step in STEPS:
        attention = PagedAttention([pool], [_chunk(layout, tables, *span) for span in step])
        for layer in (0, 1):
            rows = [torch.cat([x[which][layer, start:stop] for which, start, stop in step]) for x in (q, k, v)]
            out = attention(layer, *rows, SCALE, sinks=sinks).split([stop - start for _, start, stop in step])
            for (which, start, stop), actual in zip(step, out, strict=True):
                keys, values = k[which][layer, :stop], v[which][layer, :stop]
                expected = textbook(layout, q[which][layer, start:stop], keys, values, start, sinks)
                torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


def _chunk(layout: KVLayout, tables: Sequence[list[int]], which: int, start: int, stop: int) -> AttentionChunk:
    """Blocks that no token can look at any more are dropped, as a manager does."""
    first = lowest_attended(layout, start) // BLOCK
    return AttentionChunk(start, stop - start, (tables[which][first:],), (first,))


@pytest.mark.parametrize(("position", "lowest"), [(0, 0), (19, 0), (20, 20), (39, 20), (40, 40)])
def test_a_chunk_looks_back_to_its_own_start(position: int, lowest: int) -> None:
    assert lowest_attended(LAYOUTS["chunked"], position) == lowest


def test_a_window_looks_back_over_as_many_tokens_as_it_has() -> None:
    assert [lowest_attended(LAYOUTS["window"], position) for position in (0, 10, 11, 50)] == [0, 0, 1, 40]
