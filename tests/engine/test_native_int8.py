"""The compiled int8 linears add up integers exactly, in every instruction set this CPU has, over many shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import instruction_set, two_threads  # noqa: F401 - fixtures that every test here uses

from kvferry.engine.int8 import GROUP, quantise_rows, quantise_weight
from kvferry.engine.native import kernels
from kvferry.engine.native_operators import NativeInt8Linear, NativeInt8Packer
from kvferry.engine.weight_memory import WeightMemory
from kvferry.models import PlainLinear

PACK = NativeInt8Packer(WeightMemory())
SEEDS = st.integers(0, 1 << 30)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 [rows, outputs]: int64 sums of each group, then scaled."""
    values, scales = quantise_rows(x)
    rounded = quantise_weight(weight)
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for group in range(scales.shape[1]):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        sums = values[:, columns].long() @ rounded.values[:, columns].long().t()
        total += sums.double() * scales[:, group : group + 1].double() * rounded.scales[:, group].double()
    return total


def test_both_sides_agree_on_the_size_of_a_group() -> None:
    assert kernels.GROUP == GROUP


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 40), st.integers(1, 200), st.integers(1, 300), st.booleans(), SEEDS)
def test_linear(rows: int, outputs: int, columns: int, biased: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    y = torch.randn(rows, outputs, generator=generator)
    expected = reference(x, weight) + (0.0 if bias is None else bias.double())
    linear = PACK(weight, bias)
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-6, atol=2e-5)
    expected += y
    assert linear(x, add_to=y) is y
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=2e-5)


def test_the_largest_sums_do_not_overflow() -> None:
    for sign in (1.0, -1.0):
        y = PACK(torch.full((33, 4 * GROUP), 127.0))(torch.full((5, 4 * GROUP), sign * 127.0))
        assert torch.equal(y, torch.full((5, 33), sign * 127.0 * 127.0 * 4 * GROUP))


@pytest.mark.parametrize("columns", [1024, 1025, 5000])
@pytest.mark.parametrize("rows", [1, 13, 300])
def test_deep_and_tall_linears(columns: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight, x = torch.randn(70, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    torch.testing.assert_close(PACK(weight)(x).double(), reference(x, weight), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("rows", [2, 7, 16, 150])
def test_a_row_does_not_depend_on_its_batch(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    linear = PACK(torch.randn(100, 700, generator=generator))
    x = torch.randn(rows, 700, generator=generator)
    together = linear(x)
    alone = torch.cat([linear(row) for row in x.split(1)])
    assert torch.equal(together, alone)
    torch.set_num_threads(1)
    assert torch.equal(together, linear(x))


def test_what_is_not_finite_reaches_its_row_and_no_other() -> None:
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    x[0, 3], x[1, 99] = float("nan"), float("inf")
    y = PACK(torch.randn(40, 100, generator=torch.Generator().manual_seed(1)))(x)
    assert not bool(y[:2].isfinite().any())
    assert bool(y[2].isfinite().all())


def test_rows_that_are_not_contiguous() -> None:
    weight, wide = torch.randn(32, 16), torch.randn(5, 40)
    for x in (wide[:, 4:20], torch.randn(16, 5).t()):
        torch.testing.assert_close(PACK(weight)(x).double(), reference(x, weight), rtol=1e-6, atol=2e-5)


def test_a_misshapen_input_is_refused() -> None:
    linear = PACK(torch.randn(32, 16))
    with pytest.raises(ValueError, match=r"wanted float32 \[rows, 16\]"):
        linear(torch.randn(2, 15))
    with pytest.raises(ValueError, match="cannot add"):
        linear(torch.randn(2, 16), add_to=torch.randn(3, 32))


def test_a_quarter_of_the_memory_and_other_types_stay_plain() -> None:
    linear = PACK(torch.randn(64, 128))
    assert isinstance(linear, NativeInt8Linear)
    assert linear.packed.numel() == 64 * 128 + 64 * 2 * (128 // GROUP)
    assert isinstance(PACK(torch.zeros(4, 4, dtype=torch.bfloat16)), PlainLinear)
