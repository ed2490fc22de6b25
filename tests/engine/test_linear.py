"""Packed linears compute what plain ones do, and keep the weight once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvferry.core import ConfigError
from kvferry.engine.int8 import TorchInt8Linear
from kvferry.engine.kernels import Kernels
from kvferry.engine.linear import PRECISIONS, OneDNNLinear, linear_factory
from kvferry.engine.native_operators import NativeInt8Linear, NativeLinear
from kvferry.engine.settings import EngineSettings
from kvferry.models import PlainLinear

BOTH = pytest.mark.parametrize("kernels", [Kernels.NATIVE, Kernels.TORCH], ids=lambda kernels: kernels.value)


@BOTH
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 100])
@pytest.mark.parametrize(("out", "columns"), [(96, 64), (489, 96), (1, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_equal_to_plain(kernels: Kernels, rows: int, out: int, columns: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(out, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    expected = torch.nn.functional.linear(x, weight, bias)
    packed = linear_factory("cpu", "fp32", kernels)(weight, bias)
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-4)
    residual = torch.randn(rows, out, generator=generator)
    added = residual.clone()
    assert packed(x, add_to=added) is added
    torch.testing.assert_close(added, residual + expected, rtol=1e-5, atol=1e-4)


@BOTH
def test_rows_that_are_not_contiguous(kernels: Kernels) -> None:
    weight, wide = torch.randn(32, 16), torch.randn(5, 40)
    for x in (wide[:, 4:20], torch.randn(16, 5).t()):
        torch.testing.assert_close(linear_factory(kernels=kernels)(weight)(x), x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("kernels", "kind"), [(Kernels.NATIVE, NativeLinear), (Kernels.TORCH, OneDNNLinear)])
def test_the_plain_weight_is_not_kept(kernels: Kernels, kind: type) -> None:
    weight = torch.randn(64, 64)
    gone = weakref.ref(weight)
    packed = linear_factory(kernels=kernels)(weight)
    assert isinstance(packed, kind)
    del weight
    gc.collect()
    assert gone() is None


def test_a_misshapen_input_is_refused() -> None:
    packed = linear_factory(kernels=Kernels.NATIVE)(torch.randn(32, 16))
    with pytest.raises(ValueError, match=r"wanted float32 \[rows, 16\]"):
        packed(torch.randn(2, 15))
    with pytest.raises(ValueError, match="wanted float32"):
        packed(torch.randn(2, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match="cannot add"):
        packed(torch.randn(2, 16), add_to=torch.randn(3, 32))


def test_other_types_and_devices_keep_the_weight_as_it_is() -> None:
    assert isinstance(linear_factory("meta")(torch.empty(4, 4, device="meta")), PlainLinear)
    assert isinstance(linear_factory(kernels=Kernels.NATIVE)(torch.empty(4, 4, dtype=torch.bfloat16)), PlainLinear)


def test_an_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown precision 'fp12'.*known: .*fp32") as caught:
        linear_factory("cpu", "fp12")
    assert caught.value.field == "engine.precision"


@pytest.mark.parametrize(("device", "precision"), [("cpu", "bf16"), ("cuda", "int8"), ("meta", "int8")])
def test_a_precision_of_the_other_kind_of_device_is_refused(device: str, precision: str) -> None:
    for make in (lambda: linear_factory(device, precision), lambda: EngineSettings(device=device, precision=precision)):
        with pytest.raises(ConfigError, match=f"precision {precision} is for .* engine.device is {device}") as caught:
            make()
        assert caught.value.field == "engine.precision"


@pytest.mark.parametrize(("kernels", "kind"), [(Kernels.NATIVE, NativeInt8Linear), (Kernels.TORCH, TorchInt8Linear)])
def test_int8_by_setting(kernels: Kernels, kind: type) -> None:
    weight = torch.randn(64, 64)
    gone = weakref.ref(weight)
    assert isinstance(linear_factory("cpu", "int8", kernels)(weight), kind)
    del weight
    gc.collect()
    assert gone() is None


def test_bf16_keeps_the_weight_as_it_is() -> None:
    assert isinstance(linear_factory("meta", "bf16")(torch.empty(4, 4, device="meta")), PlainLinear)
    assert PRECISIONS.get("bf16").dtype is torch.bfloat16
