"""Rows of K and V in 8 bits, as pools and the wire have them. A *row* is one token of one head of one plane."""

from __future__ import annotations

import torch

from kvferry.core import DType

INT8_LARGEST = 127
_TINY, _HUGE = 1e-37, 3e38
"""Scales outside have no usable inverse: such a group is all zero, or not finite."""


def encode_rows(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """x: [..., head_dim]. Returns [..., elements of a row], in the type that pools of `dtype` have."""
    if dtype is not DType.INT8:
        return x.to(getattr(torch, dtype.value))
    values, scales = round_to_int8(x.float())
    return torch.cat((values, scales.unsqueeze(-1).view(torch.int8)), dim=-1)


def decode_rows(rows: torch.Tensor, stored: DType, dtype: torch.dtype) -> torch.Tensor:
    """[..., head_dim] of `dtype`, from what `encode_rows` made."""
    if stored is not DType.INT8:
        return rows.to(dtype)
    nbytes = DType.INT8.row_scale_nbytes
    scales = rows[..., -nbytes:].contiguous().view(torch.float32)
    return (rows[..., :-nbytes].float() * scales).to(dtype)


def round_to_int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups: float32 [..., values that share a scale]. Returns int8 of that shape, and float32 scales [...]."""
    scales = groups.abs().amax(dim=-1) / INT8_LARGEST
    return divided_to_int8(groups, scales), scales


def divided_to_int8(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """groups: float32 [..., values that share a scale]; scales: [...], large enough for each. int8 of that shape."""
    usable = (scales > _TINY) & (scales <= _HUGE)
    inverse = torch.where(usable, 1.0 / scales, 0.0)
    return (groups * inverse.unsqueeze(-1)).nan_to_num().round().to(torch.int8)
