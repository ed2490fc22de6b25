"""Which kernels serve is the setting's word; what is missing is named."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from kvferry.core import ConfigError
from kvferry.engine import kernels as choice
from kvferry.engine.kernels import Kernels, use_native
from kvferry.engine.linear import OneDNNLinear
from kvferry.engine.operators import operators_for
from kvferry.engine.settings import EngineSettings
from kvferry.models import operators as torch_kinds

CPU = torch.device("cpu")


@pytest.fixture
def _not_built(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setitem(sys.modules, "kvferry.engine.native.kernels", None)
    monkeypatch.delattr("kvferry.engine.native.kernels")
    choice._load.cache_clear()
    yield
    choice._load.cache_clear()


def test_built_kernels_are_the_default() -> None:
    assert use_native(Kernels.AUTO, CPU)
    assert use_native(Kernels.NATIVE, CPU)
    assert not use_native(Kernels.TORCH, CPU)
    assert not use_native(Kernels.AUTO, torch.device("cuda"))


def test_native_on_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.device is cuda.*auto") as caught:
        use_native(Kernels.NATIVE, torch.device("cuda"))
    assert caught.value.field == "engine.kernels"


@pytest.mark.usefixtures("_not_built")
def test_without_the_extension_torch_computes_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        operators = operators_for()
    assert operators.rms_norm is torch_kinds.rms_norm
    assert isinstance(operators.linear(torch.zeros(4, 4), None), OneDNNLinear)
    assert "torch computes instead" in caplog.text
    with pytest.raises(ConfigError, match="was not built"):
        use_native(Kernels.NATIVE, CPU)


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="one of auto, native, torch, got 'fast'") as caught:
        Kernels.of("fast")
    assert caught.value.field == "engine.kernels"


@pytest.mark.parametrize("kernels", [Kernels.NATIVE, Kernels.TORCH])
def test_routers_are_not_rounded(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 64, generator=generator), torch.randn(3, 64, generator=generator)
    expected = x @ weight.t()
    rounded, exact = operators_for("cpu", "int8", kernels), operators_for("cpu", "fp32", kernels)
    torch.testing.assert_close(rounded.exact_linear(weight)(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(exact.exact_linear(weight)(x), expected, rtol=1e-5, atol=1e-5)
    assert float((rounded.linear(weight)(x) - expected).abs().max()) > 1e-3


def test_an_unknown_precision_is_refused_by_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"unknown precision 'fp12': did you mean fp32\?") as caught:
        EngineSettings(precision="fp12")
    assert caught.value.field == "engine.precision"
