"""MXFP4: blocks of 32 four-bit floats that share a power of two."""

from __future__ import annotations

import torch

from kvferry.core import CheckpointError
from kvferry.models.base import Weights

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
_BLOCK = 32
_EXPONENT_BIAS = 127


def load_mxfp4(weights: Weights, name: str, experts: int, rows: int, columns: int) -> torch.Tensor:
    """[experts, rows, columns] of `name`_blocks and `name`_scales, one expert at a time."""
    if columns % _BLOCK:
        raise CheckpointError(
            f"tensor {name}_blocks: {columns} columns are no multiple of the {_BLOCK} of an MXFP4 block", field="model"
        )
    groups = columns // _BLOCK
    blocks = weights.get(f"{name}_blocks", (experts, rows, groups, _BLOCK // 2))
    scales = weights.get(f"{name}_scales", (experts, rows, groups))
    whole = blocks.new_empty((experts, rows, columns))
    for expert in range(experts):
        whole[expert] = dequantise(blocks[expert], scales[expert]).to(whole.dtype)
    return whole


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., groups * 32] of bytes [..., groups, 16] and exponents [..., groups].

    A byte holds two values, the lower half first. Both may come as any type that holds a byte exactly.
    """
    signed = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    codes = blocks.to(torch.int64)
    values = signed[torch.stack((codes & 15, codes >> 4), dim=-1)].flatten(-2)
    scaled = torch.ldexp(values, (scales.to(torch.int32) - _EXPONENT_BIAS).unsqueeze(-1))
    return scaled.flatten(-2)
