"""The compiled kernels as a model's operators: shapes are checked here, since the kernels take addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.engine.int8 import quantise_weight
from kvferry.engine.native import kernels
from kvferry.engine.weight_memory import WeightMemory
from kvferry.models import Linear, PlainLinear
from kvferry.models.operators import rms_norm as torch_rms_norm
from kvferry.models.operators import silu_product as torch_silu_product

_Kernel = Callable[[int, int, int, int, int, int, int, int, int, bool, int], None]
"""`kernels.linear`, or one with the same arguments."""


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """packed: the weight in panels of `kernels.PANEL` outputs; nothing keeps the plain one. A row's results depend
    on nothing else in the batch, nor on the number of rows or threads."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    columns: int

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return _apply(kernels.linear, self, x, add_to)


@dataclass(frozen=True, slots=True)
class NativeInt8Linear(NativeLinear):
    """The same over int8; packed: the values beside their scales."""

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return _apply(kernels.linear_int8, self, x, add_to)


def _apply(kernel: _Kernel, linear: NativeLinear, x: torch.Tensor, add_to: torch.Tensor | None) -> torch.Tensor:
    x, y = _rows_in_place(x, linear.columns), _results(add_to, x.shape[0], linear.outputs)
    kernel(
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        linear.columns,
        linear.packed.data_ptr(),
        0 if linear.bias is None else linear.bias.data_ptr(),
        y.data_ptr(),
        y.stride(0),
        linear.outputs,
        add_to is not None,
        torch.get_num_threads(),
    )
    return y


def _rows_in_place(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x itself where the kernels can read it: float32 rows of `columns`, each in one piece."""
    if x.dim() != 2 or x.shape[1] != columns or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"wanted float32 [rows, {columns}] on the CPU, got {x.dtype} {tuple(x.shape)} on {x.device}")
    return x if x.stride(1) == 1 else x.contiguous()


@dataclass(frozen=True, slots=True)
class NativePacker:
    """Copies weights into panels, all in one memory. Other types than float32 stay plain."""

    memory: WeightMemory

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return pack_native(weight, bias, self.memory) if weight.dtype == torch.float32 else PlainLinear(weight, bias)


def _results(add_to: torch.Tensor | None, rows: int, outputs: int) -> torch.Tensor:
    """Where y goes: `add_to` where the kernels can write it, or a new tensor."""
    if add_to is None:
        return torch.empty((rows, outputs))
    if add_to.shape != (rows, outputs) or add_to.dtype != torch.float32 or add_to.stride(1) != 1:
        raise ValueError(f"cannot add float32 {rows, outputs} to {add_to.dtype} {tuple(add_to.shape)}")
    return add_to


@dataclass(frozen=True, slots=True)
class NativeInt8Packer:
    """Rounds weights to int8, all in one memory. Other types than float32 stay plain."""

    memory: WeightMemory

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        if weight.dtype != torch.float32:
            return PlainLinear(weight, bias)
        outputs, columns = weight.shape
        rounded = quantise_weight(weight)
        packed = self.memory.take(kernels.packed_int8_nbytes(outputs, columns))
        kernels.pack_int8(
            rounded.values.data_ptr(),
            rounded.scales.data_ptr(),
            outputs,
            columns,
            packed.data_ptr(),
            torch.get_num_threads(),
        )
        return NativeInt8Linear(packed, None if bias is None else bias.contiguous(), outputs, columns)


def pack_native(weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory) -> NativeLinear:
    outputs, columns = weight.shape
    weight = weight.contiguous()
    packed = memory.take(4 * kernels.packed_floats(outputs, columns)).view(torch.float32)
    kernels.pack(weight.data_ptr(), outputs, columns, packed.data_ptr(), torch.get_num_threads())
    return NativeLinear(packed, None if bias is None else bias.contiguous(), outputs, columns)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    columns = x.shape[-1]
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or weight.shape != (columns,):
        return torch_rms_norm(x, weight, eps)
    y = torch.empty(x.shape)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, columns).contiguous()
    kernels.rms_norm(
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        eps,
        y.data_ptr(),
        rows.shape[0],
        columns,
        torch.get_num_threads(),
    )
    return y


def silu_product(both: torch.Tensor) -> torch.Tensor:
    if both.dtype != torch.float32 or both.dim() != 2 or both.shape[1] % 2:
        return torch_silu_product(both)
    both = both.contiguous()
    rows, width = both.shape[0], both.shape[1] // 2
    y = torch.empty((rows, width))
    kernels.silu_mul(both.data_ptr(), y.data_ptr(), rows, width, torch.get_num_threads())
    return y
