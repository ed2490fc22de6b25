"""Layers computed in one call give the same bits as their parts one by one; what is not compiled stays as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import instruction_set, two_threads  # noqa: F401 - fixtures that every test here uses

from kvferry.core import DType, GroupKind, KVLayout
from kvferry.engine.attention import PagedAttention
from kvferry.engine.kernels import Kernels
from kvferry.engine.native import kernels
from kvferry.engine.native_operators import NativeInt8Packer, NativePacker, rms_norm, silu_product
from kvferry.engine.native_stack import NativeStack, native_stack
from kvferry.engine.spans import AttentionChunk
from kvferry.engine.weight_memory import WeightMemory
from kvferry.kvcache import KVPool
from kvferry.kvcache.pool import build_pool
from kvferry.models import DecoderLayer, LinearFactory, PlainStack, RMSNorm, plain_linear
from kvferry.models.layers import GatedMLP, SelfAttention
from kvferry.models.operators import silu_product as torch_silu_product

HEADS, KV_HEADS, DIM, HIDDEN, WIDTH, BLOCK = 6, 2, 16, 72, 100, 4
PACKERS: dict[str, LinearFactory] = {
    "fp32": NativePacker(WeightMemory()),
    "int8": NativeInt8Packer(WeightMemory()),
}


def layer(index: int, linear: LinearFactory, generator: torch.Generator, biased: bool = False) -> DecoderLayer:
    def packed(outputs: int, columns: int) -> object:
        bias = torch.randn(outputs, generator=generator) if biased else None
        return linear(torch.randn(outputs, columns, generator=generator) * columns**-0.5, bias)

    def norm() -> RMSNorm:
        return RMSNorm(rms_norm, torch.rand(HIDDEN, generator=generator) + 0.5, 1e-5)

    qkv, out = packed((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), packed(HIDDEN, HEADS * DIM)
    attention = SelfAttention(index, qkv, out, HEADS, KV_HEADS, DIM)  # type: ignore[arg-type]
    mlp = GatedMLP(packed(2 * WIDTH, HIDDEN), silu_product, packed(HIDDEN, WIDTH))  # type: ignore[arg-type]
    return DecoderLayer(norm(), attention, norm(), mlp)


def layers(precision: str, biased: bool = False, count: int = 3) -> list[DecoderLayer]:
    generator = torch.Generator().manual_seed(count)
    return [layer(index, PACKERS[precision], generator, biased) for index in range(count)]


def pools(dtype: DType = DType.FLOAT32) -> list[KVPool]:
    """Layers 0 and 2 see everything, layer 1 a window."""
    kinds = ((GroupKind.FULL, (0, 2), None), (GroupKind.WINDOW, (1,), 7))
    made = []
    for kind, held, window in kinds:
        pool = build_pool(KVLayout(kind, held, KV_HEADS, DIM, dtype, BLOCK, window=window), 40, "cpu")
        pool.view.zero_()
        made.append(pool)
    return made


def chunks(spans: list[tuple[int, int]]) -> list[AttentionChunk]:
    taken, made = 0, []
    for start, length in spans:
        blocks = -(-(start + length) // BLOCK)
        table = tuple(range(taken, taken + blocks))
        made.append(AttentionChunk(start, length, (table, table), (0, 0)))
        taken += blocks
    return made


def turn(rows: int) -> torch.Tensor:
    angles = torch.randn(rows, 1, DIM // 2, generator=torch.Generator().manual_seed(rows))
    return torch.polar(torch.ones_like(angles), angles)


SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(SPANS, st.sampled_from(["fp32", "int8"]), st.booleans(), st.sampled_from([DType.FLOAT32, DType.INT8]))
def test_the_same_bits_as_one_by_one(spans: list[tuple[int, int]], precision: str, biased: bool, dtype: DType) -> None:
    parts, step = layers(precision, biased), chunks(spans)
    rows = sum(length for _, length in spans)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    results, caches = [], []
    for stack in (native_stack(parts), PlainStack(parts)):
        held = pools(dtype)
        results.append(stack(x.clone(), turn(rows), PagedAttention(held, step)))
        caches.append([pool.view for pool in held])
    assert torch.equal(*results)
    assert not torch.equal(results[0], x)
    assert all(torch.equal(mine, others) for mine, others in zip(*caches, strict=True))


def test_it_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = native_stack(layers("fp32"))
    assert isinstance(stack, NativeStack)
    for name in ("linear", "rms_norm", "silu_mul"):
        monkeypatch.delattr(kernels, name)
    stack(torch.ones(2, HIDDEN), turn(2), PagedAttention(pools(), chunks([(0, 2)])))


def test_torchs_attention_is_left_to_the_layers_themselves() -> None:
    parts = layers("fp32")
    x, step = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5)), chunks([(0, 5)])
    mine = native_stack(parts)(x.clone(), turn(5), PagedAttention(pools(), step, Kernels.TORCH))
    other = PlainStack(parts)(x.clone(), turn(5), PagedAttention(pools(), step, Kernels.TORCH))
    assert torch.equal(mine, other)


def test_a_part_that_is_not_compiled_keeps_all_apart() -> None:
    whole = layers("fp32")
    first = whole[0]
    norm = RMSNorm(rms_norm, torch.ones(DIM), 1e-5)
    foreign = plain_linear(torch.zeros(HIDDEN, WIDTH))
    for odd in (
        replace(first, mlp=replace(first.mlp, down=foreign)),
        replace(first, mlp=replace(first.mlp, silu_product=torch_silu_product)),
        replace(first, attention=replace(first.attention, q_norm=norm, k_norm=norm)),
        replace(first, mlp_norm=replace(first.mlp_norm, weight=torch.ones(HIDDEN, dtype=torch.bfloat16))),
    ):
        assert native_stack([odd, *whole[1:]]) == PlainStack([odd, *whole[1:]])
    assert native_stack([]) == PlainStack([])


def test_what_does_not_fit_is_refused() -> None:
    stack, attention = native_stack(layers("fp32")), PagedAttention(pools(), chunks([(0, 2)]))
    with pytest.raises(ValueError, match=r"wanted 2 rows of 72, got \(3, 72\)"):
        stack(torch.ones(3, HIDDEN), turn(3), attention)
    with pytest.raises(ValueError, match="turned by"):
        stack(torch.ones(2, HIDDEN), turn(1), attention)
    narrow = KVLayout(GroupKind.FULL, (0, 1, 2), 1, DIM, DType.FLOAT32, BLOCK)
    alone = [AttentionChunk(0, 2, ((0,),), (0,))]
    with pytest.raises(ValueError, match=r"layer 0 has KV heads \(2, 16\), its pool \(1, 16\)"):
        stack(torch.ones(2, HIDDEN), turn(2), PagedAttention([build_pool(narrow, 2, "cpu")], alone))
    odd = layers("fp32", count=1)[0]
    with pytest.raises(ValueError, match="do not fit each other"):
        NativeStack([replace(odd, mlp=replace(odd.mlp, down=odd.attention.out))])
