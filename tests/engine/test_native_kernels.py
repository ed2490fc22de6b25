"""Each compiled kernel equals torch's arithmetic, in every instruction set this CPU has, over many shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import instruction_set, two_threads  # noqa: F401 - fixtures that every test here uses

from kvferry.core import AxisOrder, DType, GroupKind, KVLayout
from kvferry.engine.attention import PagedAttention
from kvferry.engine.kernels import Kernels
from kvferry.engine.native import kernels
from kvferry.engine.native_operators import NativePacker, rms_norm, silu_product
from kvferry.engine.spans import AttentionChunk
from kvferry.engine.weight_memory import WeightMemory
from kvferry.kvcache.pool import build_pool
from kvferry.kvcache.rows import decode_rows, encode_rows
from kvferry.models import operators as torch_kinds

PACK = NativePacker(WeightMemory())
SEEDS = st.integers(0, 1 << 30)


def test_one_openmp_runtime() -> None:
    """Two of them would each keep threads spinning on the same cores."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(runtimes) == 1


def test_an_unknown_set_changes_nothing() -> None:
    before = kernels.selected()
    assert not kernels.use("mmx")
    assert kernels.selected() == before


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 200), st.integers(1, 150), st.booleans(), SEEDS)
def test_linear(rows: int, outputs: int, columns: int, biased: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    y = torch.randn(rows, outputs, generator=generator)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    linear = PACK(weight, bias)
    torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=2e-6 * columns**0.5 * 4)
    expected += y
    torch.testing.assert_close(linear(x, add_to=y).double(), expected, rtol=0, atol=2e-6 * columns**0.5 * 4)


@pytest.mark.parametrize("columns", [191, 192, 193, 769, 2048])
@pytest.mark.parametrize("rows", [1, 4, 5, 300])
def test_deep_and_tall_linears(columns: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight, x = torch.randn(70, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    bias, y = torch.randn(70, generator=generator), torch.randn(rows, 70, generator=generator)
    expected = x.double() @ weight.double().t() + bias + y
    torch.testing.assert_close(PACK(weight, bias)(x, add_to=y).double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("rows", [2, 7, 16, 150])
def test_a_row_does_not_depend_on_its_batch(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    linear = PACK(torch.randn(100, 2100, generator=generator))
    x = torch.randn(rows, 2100, generator=generator)
    together = linear(x)
    alone = torch.cat([linear(row) for row in x.split(1)])
    assert torch.equal(together, alone)
    torch.set_num_threads(1)
    assert torch.equal(together, linear(x))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 100), SEEDS)
def test_rms_norm(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, columns + 3, generator=generator)
    weight = torch.randn(columns, generator=generator)
    for x in (wide[:, :columns], wide[:, 1 : columns + 1].unsqueeze(1)):
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch_kinds.rms_norm(x, weight, 1e-5))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 100), st.sampled_from([0.1, 1.0, 30.0, 1000.0]), SEEDS)
def test_silu_product(rows: int, width: int, spread: float, seed: int) -> None:
    both = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed)) * spread
    torch.testing.assert_close(silu_product(both), torch_kinds.silu_product(both), rtol=2e-6, atol=1e-30)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[KVLayout, int, list[tuple[int, int]]]:
    """A layout, query heads per KV head, and (start, length) of each sequence."""
    layout = KVLayout(
        kind=GroupKind.FULL,
        layers=(0, 1),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([2, 8, 12, 20, 64, 80, 130])),
        dtype=draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.INT8])),
        tokens_per_block=draw(st.sampled_from([1, 4, 16])),
        axis_order=draw(st.sampled_from(list(AxisOrder))),
        window=draw(st.sampled_from([None, None, 1, 7, 150])),
    )
    length = st.one_of(st.just(1), st.integers(2, 60))
    sequences = st.lists(
        st.tuples(st.one_of(st.integers(0, 40), st.integers(400, 1100)), length), min_size=1, max_size=4
    )
    return layout, draw(st.sampled_from([1, 2, 3, 5])), draw(sequences)


@settings(max_examples=60, deadline=None)
@given(_steps(), st.booleans(), SEEDS)
def test_attention(step: tuple[KVLayout, int, list[tuple[int, int]]], turned: bool, seed: int) -> None:
    layout, share, sequences = step
    generator = torch.Generator().manual_seed(seed)
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
    rows, heads = sum(length for _, length in sequences), share * layout.kv_heads
    qkv = torch.randn(rows, heads + 2 * layout.kv_heads, layout.head_dim, generator=generator)
    q, k, v = qkv.split((heads, layout.kv_heads, layout.kv_heads), dim=1)
    angles = torch.rand(rows, 1, layout.head_dim // 2, generator=generator) * 7
    turn = torch.polar(torch.ones_like(angles), angles) if turned else None
    scale = layout.head_dim**-0.5
    native, plain = (
        PagedAttention([pool], chunks, choice)(1, q, k, v, scale, turn)
        for pool, choice in zip(pools, (Kernels.NATIVE, Kernels.TORCH), strict=True)
    )
    if turned and layout.dtype is not DType.FLOAT32:
        # Both turn keys with errors of their own, and now and then that tips one over to the next value.
        stored = [decode_rows(pool.view, layout.dtype, torch.float32) for pool in pools]
        torch.testing.assert_close(stored[0], stored[1], rtol=1e-2, atol=6 / 127)
        torch.testing.assert_close(native, plain, rtol=0, atol=0.05)
        return
    torch.testing.assert_close(pools[0].view, pools[1].view, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(native, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [1, 5])
def test_the_last_token_of_a_chunk_far_behind_its_start(share: int) -> None:
    """Chunks are cut into tiles; one of a single token must see a context of any length."""
    length, start = 144 // share + 1, 1900
    layout = KVLayout(GroupKind.FULL, (0,), 1, 64)
    generator = torch.Generator().manual_seed(4)
    count = layout.blocks_for(start + length)
    pools = [build_pool(layout, count, "cpu") for _ in range(2)]
    pools[0].view.normal_(generator=generator)
    pools[1].view.copy_(pools[0].view)
    chunks = [AttentionChunk(start, length, (list(range(count)),), (0,))]
    q, k, v = torch.randn(length, share + 2, 64, generator=generator).split((share, 1, 1), dim=1)
    native, plain = (
        PagedAttention([pool], chunks, choice)(0, q, k, v, 0.125)
        for pool, choice in zip(pools, (Kernels.NATIVE, Kernels.TORCH), strict=True)
    )
    torch.testing.assert_close(native, plain, rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    layout = KVLayout(GroupKind.FULL, (0,), 2, 64)
    pool = build_pool(layout, 200, "cpu")
    pool.view.normal_(generator=torch.Generator().manual_seed(0))
    starts = [0, 5, 700, 1500]
    tables = [[(17 * block + 50 * n) % 200 for block in range(94)] for n in range(4)]
    qkv = torch.randn(4, 10, 64, generator=torch.Generator().manual_seed(1))
    chunks = [AttentionChunk(start, 1, (table,), (0,)) for start, table in zip(starts, tables, strict=True)]

    def run(numbers: list[int]) -> torch.Tensor:
        q, k, v = qkv[numbers].split((6, 2, 2), dim=1)
        return PagedAttention([pool], [chunks[n] for n in numbers], Kernels.NATIVE)(0, q, k, v, 0.125)

    together = run([0, 1, 2, 3])
    for number in range(4):
        assert torch.equal(run([number])[0], together[number])


def test_a_block_table_out_of_the_pool_is_refused() -> None:
    layout = KVLayout(GroupKind.FULL, (0,), 1, 8)
    with pytest.raises(ValueError, match="outside the pool's 4"):
        PagedAttention([build_pool(layout, 4, "cpu")], [AttentionChunk(0, 1, ((4,),), (0,))], Kernels.NATIVE)


def test_misshapen_queries_are_refused() -> None:
    pool = build_pool(KVLayout(GroupKind.FULL, (0,), 2, 8), 4, "cpu")
    attention = PagedAttention([pool], [AttentionChunk(0, 1, ((0,),), (0,))], Kernels.NATIVE)
    x = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="wanted float32"):
        attention(0, torch.zeros(2, 2, 8), x, x, 1.0)
    with pytest.raises(ValueError, match="cannot share 2 KV heads"):
        attention(0, torch.zeros(1, 3, 8), x, x, 1.0)
    with pytest.raises(ValueError, match="turn must hold"):
        attention(0, x, x, x, 1.0, torch.zeros(2, 1, 4, dtype=torch.complex64))
