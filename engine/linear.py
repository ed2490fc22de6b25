"""Linears packed once per device. Which packing is a fixed table, so that all workers round alike.

Measured figures are in docs/performance.md. The compiled packing serves every number of rows; oneDNN's, packed for
16 rows, is what torch has to offer where the compiled kernels are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.core import Registry
from kvferry.engine.kernels import Kernels, use_native
from kvferry.models import Linear, LinearFactory, plain_linear

_PACK_ROWS = 16
"""What oneDNN chooses its blocking for; a packed weight serves any number of rows."""


@dataclass(frozen=True, slots=True)
class OneDNNLinear:
    """packed: the weight in oneDNN's own blocked order; nothing keeps the plain one."""

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y if add_to is None else add_to.add_(y)


def pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Copies `weight` into oneDNN's order. Without oneDNN in this torch, a plain linear."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return plain_linear(weight, bias)
    with torch.inference_mode():
        return OneDNNLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS), bias)


def _native_packer() -> LinearFactory:
    from kvferry.engine.native_operators import NativePacker
    from kvferry.engine.weight_memory import WeightMemory

    return NativePacker(WeightMemory())


@dataclass(frozen=True, slots=True)
class CPUPacking:
    """How linears are packed on the CPU at one precision. native: makes the packer of one model, by the compiled
    kernels; torch: without them."""

    native: Callable[[], LinearFactory]
    torch: LinearFactory


def linear_factory(
    device: str | torch.device = "cpu", precision: str = "fp32", kernels: Kernels = Kernels.AUTO
) -> LinearFactory:
    """The packing of one model on `device`. Raises ConfigError naming the setting that cannot be served."""
    on_cpu = PRECISIONS.get(precision)
    if torch.device(device).type != "cpu":
        return plain_linear
    return on_cpu.native() if use_native(kernels, torch.device(device)) else on_cpu.torch


PRECISIONS: Registry[CPUPacking] = Registry("precision", "engine.precision")

PRECISIONS.register("fp32", CPUPacking(native=_native_packer, torch=pack_onednn))
