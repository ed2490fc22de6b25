"""Packed linears compute what plain ones do, and keep the weight once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvferry.core import ConfigError
from kvferry.engine.linear import OneDNNLinear, PlainLinear, linear_factory


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 100])
@pytest.mark.parametrize(("out", "columns"), [(96, 64), (489, 96), (1, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_equal_to_plain(rows: int, out: int, columns: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(out, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear_factory("cpu", "fp32")(weight, bias)(x), expected, rtol=1e-5, atol=1e-4)


def test_rows_that_are_not_contiguous() -> None:
    weight, wide = torch.randn(32, 16), torch.randn(5, 40)
    x = wide[:, 4:20]
    torch.testing.assert_close(linear_factory()(weight)(x), x @ weight.t(), rtol=1e-5, atol=1e-4)


def test_the_plain_weight_is_not_kept() -> None:
    weight = torch.randn(64, 64)
    gone = weakref.ref(weight)
    packed = linear_factory()(weight)
    assert isinstance(packed, OneDNNLinear)
    del weight
    gc.collect()
    assert gone() is None


def test_other_devices_keep_the_weight_as_it_is() -> None:
    assert isinstance(linear_factory("meta")(torch.empty(4, 4, device="meta")), PlainLinear)


def test_an_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown precision 'fp12'.*known: fp32") as caught:
        linear_factory("cpu", "fp12")
    assert caught.value.field == "engine.precision"
