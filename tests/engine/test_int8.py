"""Rounding to int8: what is lost, what is kept exactly, and linears of it in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.int8 import GROUP, TorchInt8Linear, pack_torch_int8, quantise_rows, quantise_weight
from kvferry.kvcache.rows import round_to_int8
from kvferry.models import PlainLinear

SEEDS = st.integers(0, 1 << 30)


def test_known_values() -> None:
    x = torch.tensor([[0.0, 1.27, -1.27, 0.634, 0.636, -0.005, 0.005001]])
    values, scales = quantise_rows(x)
    assert values.tolist() == [[0, 127, -127, 63, 64, 0, 1]]
    assert scales.tolist() == [[pytest.approx(0.01)]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 200), st.sampled_from([1e-30, 1.0, 1e20]), SEEDS)
def test_values_are_half_a_step_off_at_most(rows: int, columns: int, spread: float, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread
    values, scales = quantise_rows(x)
    assert scales.shape == (rows, -(-columns // GROUP))
    step = scales.repeat_interleave(GROUP, dim=1)[:, :columns]
    assert bool(((values * step - x).abs() <= 0.5001 * step).all())
    weight = quantise_weight(x)
    step = weight.scales.float().repeat_interleave(GROUP, dim=1)[:, :columns]
    assert bool(((weight.dequantised() - x).abs() <= 0.5001 * step).all())
    assert bool((weight.scales.float() >= scales).all())
    assert bool((weight.scales.float() <= scales * (1 + 2**-7)).all())


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    values, scales = quantise_rows(torch.tensor([[0.0] * GROUP + [float("inf")], [float("nan")] * (GROUP + 1)]))
    assert not values.any()
    assert scales[0].tolist() == [0.0, float("inf")]
    assert bool(scales[1].isnan().all())


def test_any_axis_may_share_a_scale() -> None:
    values, scales = round_to_int8(torch.tensor([[[1.0, -2.0]], [[3.0, 0.0]]]))
    assert values.tolist() == [[[64, -127]], [[127, 0]]]
    assert scales.tolist() == [[pytest.approx(2 / 127)], [pytest.approx(3 / 127)]]


def test_a_large_weight_is_rounded_like_a_small_one() -> None:
    weight = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    whole, part = quantise_weight(weight), quantise_weight(weight[4500:])
    assert torch.equal(whole.values[4500:], part.values)
    assert torch.equal(whole.scales[4500:], part.scales)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64: sums of integers within a group, scaled and added up."""
    values, scales = quantise_rows(x)
    rounded = quantise_weight(weight)
    left = values.double() * scales.double().repeat_interleave(GROUP, dim=1)[:, : x.shape[1]]
    return left @ rounded.dequantised().double().t()


@pytest.mark.parametrize("columns", [5, GROUP, 200])
def test_the_linear_is_a_product_of_rounded_values(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight, x = torch.randn(40, columns, generator=generator), torch.randn(7, columns, generator=generator)
    bias, residual = torch.randn(40, generator=generator), torch.randn(7, 40, generator=generator)
    linear = pack_torch_int8(weight, bias)
    assert isinstance(linear, TorchInt8Linear)
    expected = exact(x, weight) + bias
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-4)
    added = residual.clone()
    assert linear(x, add_to=added) is added
    torch.testing.assert_close(added.double(), residual + expected, rtol=1e-5, atol=1e-4)


def test_other_types_stay_plain() -> None:
    assert isinstance(pack_torch_int8(torch.zeros(2, 2, dtype=torch.bfloat16)), PlainLinear)
