"""The compiled kernels as a model's operators: shapes are checked here, since the kernels take addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.engine.native import kernels
from kvferry.engine.weight_memory import WeightMemory
from kvferry.models import Linear, PlainLinear
from kvferry.models.operators import rms_norm as torch_rms_norm
from kvferry.models.operators import silu_product as torch_silu_product


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """packed: the weight in panels of `kernels.PANEL` outputs; nothing keeps the plain one. A row's results depend
    on nothing else in the batch, nor on the number of rows or threads."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    columns: int

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        x = _rows_in_place(x, self.columns)
        rows = x.shape[0]
        y = torch.empty((rows, self.outputs)) if add_to is None else add_to
        if y.shape != (rows, self.outputs) or y.dtype != torch.float32 or y.stride(1) != 1:
            raise ValueError(f"cannot add float32 {rows, self.outputs} to {y.dtype} {tuple(y.shape)}")
        kernels.linear(
            x.data_ptr(),
            x.stride(0),
            rows,
            self.columns,
            self.packed.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            self.outputs,
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
