"""Linears over int8, in torch: how weights are rounded, and what computes where the compiled kernels are missing.

A *group* is `GROUP` consecutive columns. Weights keep one scale per output and group, rounded once when they are
loaded; activations get one per row and group as they come. Sums within a group are sums of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from kvferry.kvcache.rows import INT8_LARGEST, divided_to_int8, round_to_int8
from kvferry.models import Linear, PlainLinear

GROUP = 32
"""Columns that share a scale. The compiled kernels have the same number."""

_ROWS_AT_ONCE = 1 << 12


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """values: int8 [outputs, columns]; scales: bfloat16 [outputs, ceil(columns / GROUP)]."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantised(self) -> torch.Tensor:
        """float32 [outputs, columns]."""
        columns = self.values.shape[1]
        return self.values * self.scales.float().repeat_interleave(GROUP, dim=1)[:, :columns]


def quantise_weight(weight: torch.Tensor) -> Int8Weight:
    """weight: [outputs, columns], which may be large: works on some rows at a time."""
    parts = [_quantise_weight(rows) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    return Int8Weight(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))


def _quantise_weight(weight: torch.Tensor) -> Int8Weight:
    groups = _grouped(weight.float())
    scales = _bfloat16_up(groups.abs().amax(dim=-1) / INT8_LARGEST)
    return Int8Weight(divided_to_int8(groups, scales.float()).flatten(1)[:, : weight.shape[1]].contiguous(), scales)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: float32 [rows, columns]. Returns int8 [rows, columns] and float32 [rows, groups]; where x is not finite the
    scale is not either."""
    values, scales = round_to_int8(_grouped(x))
    return values.flatten(1)[:, : x.shape[1]], scales


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """[rows, groups, GROUP], zero-padded."""
    groups = -(-x.shape[1] // GROUP)
    return pad(x, (0, groups * GROUP - x.shape[1])).view(x.shape[0], groups, GROUP)


def _bfloat16_up(scales: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 at or above: rounded down, the largest value of a group would not fit. scales: not negative."""
    rounded = scales.to(torch.bfloat16)
    return torch.where(rounded.float() < scales, (rounded.view(torch.int16) + 1).view(torch.bfloat16), rounded)


@dataclass(frozen=True, slots=True)
class TorchInt8Linear:
    """The same arithmetic up to float32's rounding, by a product of what both sides stand for. Slower than float32
    in all but memory: the weight is widened at every use."""

    weight: Int8Weight
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        values, scales = quantise_rows(x)
        rounded = values * scales.repeat_interleave(GROUP, dim=1)[:, : x.shape[1]]
        y = linear(rounded, self.weight.dequantised(), self.bias)
        return y if add_to is None else add_to.add_(y)


def pack_torch_int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Other types than float32 stay plain."""
    if weight.dtype != torch.float32:
        return PlainLinear(weight, bias)
    return TorchInt8Linear(quantise_weight(weight), bias)
