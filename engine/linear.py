"""Linears packed once per device. Which packing is a fixed table, so that all workers round alike.

Measured figures are in docs/performance.md. The compiled packing serves every number of rows; oneDNN's, packed for
16 rows, is what torch has to offer where the compiled kernels are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.core import ConfigError, Registry
from kvferry.engine.int8 import GROUP, pack_torch_int8
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


def _native_int8_packer() -> LinearFactory:
    from kvferry.engine.native_operators import NativeInt8Packer
    from kvferry.engine.weight_memory import WeightMemory

    return NativeInt8Packer(WeightMemory())


@dataclass(frozen=True, slots=True)
class Precision:
    """What linears compute in. dtype: of weights as they are loaded, and of activations; nbytes_per_weight: packed.

    native makes the packer of one model by the compiled CPU kernels, torch packs without them; on other devices
    weights stay as they are. Where one is None, or `elsewhere` is false, the precision is not computed there.
    """

    dtype: torch.dtype
    nbytes_per_weight: float
    native: Callable[[], LinearFactory] | None
    torch: LinearFactory | None
    elsewhere: bool


PRECISIONS: Registry[Precision] = Registry("precision", "engine.precision")

PRECISIONS.register("fp32", Precision(torch.float32, 4, _native_packer, pack_onednn, elsewhere=True))
PRECISIONS.register(
    "int8", Precision(torch.float32, 1 + 2 / GROUP, _native_int8_packer, pack_torch_int8, elsewhere=False)
)
PRECISIONS.register("bf16", Precision(torch.bfloat16, 2, None, None, elsewhere=True))


def check_precision(device: str | torch.device, precision: str) -> None:
    """Raises ConfigError when there is no such precision, or not on that kind of device."""
    found = PRECISIONS.get(precision)
    on_cpu = str(device).partition(":")[0] == "cpu"
    if on_cpu and found.native is None:
        raise ConfigError(
            f"engine.precision {precision} is for GPUs, and engine.device is {device}: set it to fp32 or int8",
            field="engine.precision",
        )
    if not on_cpu and not found.elsewhere:
        raise ConfigError(
            f"engine.precision {precision} is for the CPU, and engine.device is {device}: set it to fp32 or bf16",
            field="engine.precision",
        )


def linear_factory(
    device: str | torch.device = "cpu", precision: str = "fp32", kernels: Kernels = Kernels.AUTO
) -> LinearFactory:
    """The packing of one model on `device`. Raises ConfigError naming the setting that cannot be served."""
    check_precision(device, precision)
    found = PRECISIONS.get(precision)
    if torch.device(device).type != "cpu":
        return plain_linear
    assert found.native is not None, "checked above"
    assert found.torch is not None, "checked above"
    return found.native() if use_native(kernels, torch.device(device)) else found.torch
