"""The Triton kernel, in Triton's interpreter, equals torch's operators. Needs the package: pip install '.[triton]'."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton_interpreter  # noqa: F401

from kvferry.core import AxisOrder, DType, GroupKind, KVLayout
from kvferry.engine.attention import PagedAttention
from kvferry.engine.kernels import Kernels
from kvferry.engine.spans import AttentionChunk, spans_of
from kvferry.engine.triton_attention import STRETCH, TritonGroupStep, can_attend
from kvferry.kvcache.pool import build_pool
from kvferry.kvcache.rows import encode_rows

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the log of a stretch nobody needs


def check(
    layout: KVLayout,
    sequences: Sequence[tuple[int, int]],
    share: int = 3,
    turned: bool = False,
    sinks: bool = False,
    tolerance: float = 2e-5,
) -> None:
    """One step of (start, length) of each sequence, over scattered blocks that hold anything."""
    generator = torch.Generator().manual_seed(len(sequences) + layout.head_dim)
    counts = [layout.blocks_for(start + length) for start, length in sequences]
    pools = [build_pool(layout, sum(counts), "cpu") for _ in range(2)]
    held = torch.randn(*pools[0].view.shape[:-1], layout.head_dim, generator=generator)
    for pool in pools:
        pool.view.copy_(encode_rows(held, layout.dtype))
    order = torch.randperm(sum(counts), generator=generator).split(counts)
    chunks = [
        AttentionChunk(start, length, (table.tolist(),), (0,))
        for (start, length), table in zip(sequences, order, strict=True)
    ]
    rows, heads, dim = sum(length for _, length in sequences), share * layout.kv_heads, layout.head_dim
    qkv = torch.randn(rows, heads + 2 * layout.kv_heads, dim, generator=generator)
    q, k, v = qkv.split((heads, layout.kv_heads, layout.kv_heads), dim=1)
    angles = torch.rand(rows, 1, dim // 2, generator=generator) * 7
    turn = torch.polar(torch.ones_like(angles), angles) if turned else None
    sink = torch.randn(heads, generator=generator) if sinks else None
    expected = PagedAttention([pools[0]], chunks, Kernels.TORCH)(1, q, k, v, dim**-0.5, turn, sinks=sink)
    step = TritonGroupStep(pools[1], spans_of(layout, chunks, 0))
    torch.testing.assert_close(step.attend(0, q, k, v, dim**-0.5, turn, sink), expected, rtol=0, atol=tolerance)
    assert torch.equal(pools[0].buffer, pools[1].buffer)


def layout_of(
    dtype: DType = DType.FLOAT32,
    kind: GroupKind = GroupKind.FULL,
    window: int | None = None,
    head_dim: int = 20,
    order: AxisOrder = AxisOrder.HEAD_TOKEN,
    planes: int = 2,
    kv_heads: int = 2,
) -> KVLayout:
    return KVLayout(kind, (1, 4), kv_heads, head_dim, dtype, 8, order, window, planes)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8])
@pytest.mark.parametrize("order", AxisOrder)
def test_decoding_and_chunks_in_one_step(dtype: DType, order: AxisOrder) -> None:
    check(layout_of(dtype, order=order), [(0, 1), (37, 1), (12, 9), (0, 30)])


def test_long_contexts_are_merged_from_stretches() -> None:
    check(layout_of(head_dim=8), [(STRETCH - 1, 1), (STRETCH, 1), (2 * STRETCH + 5, 1), (3, 1)], share=1)


@pytest.mark.parametrize("window", [1, 5, 24])
def test_windows(window: int) -> None:
    check(layout_of(kind=GroupKind.WINDOW, window=window), [(50, 1), (3, 1), (20, 30)], turned=True)


def test_chunks_of_positions() -> None:
    check(layout_of(kind=GroupKind.CHUNKED, window=16), [(40, 1), (31, 1), (32, 1), (10, 30)])


def test_one_plane_stands_for_both() -> None:
    check(layout_of(kind=GroupKind.MLA, head_dim=24, planes=1, kv_heads=1), [(19, 1), (5, 12)], share=5)


def test_sinks() -> None:
    check(layout_of(), [(9, 1), (2 * STRETCH, 1), (4, 11)], sinks=True)


def test_half_precision_queries_come_back_as_they_are() -> None:
    """In float16: products of bfloat16 are what the interpreter cannot do."""
    layout = layout_of(DType.BFLOAT16, head_dim=16)
    pool = build_pool(layout, 2, "cpu")
    chunk = AttentionChunk(0, 10, ((0, 1),), (0,))
    q, k, v = torch.randn(10, 8, 16, generator=torch.Generator().manual_seed(0)).split((4, 2, 2), dim=1)
    step = TritonGroupStep(pool, spans_of(layout, [chunk], 0))
    out = step.attend(0, q.half(), k.half(), v.half(), 0.25, None)
    assert out.dtype is torch.float16
    expected = PagedAttention([pool], [chunk], Kernels.TORCH)(1, q, k, v, 0.25)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.02)


def test_what_it_cannot_attend_over() -> None:
    assert can_attend(layout_of(DType.INT8, head_dim=64))
    assert not can_attend(layout_of(DType.INT8, head_dim=66))
    assert can_attend(layout_of(head_dim=66))
    assert not can_attend(layout_of(head_dim=576))
