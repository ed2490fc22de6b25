"""KV as it may travel: each row (one head of one token) as 8-bit numbers and a scale of its own.

The wire has a layout of its own, whose rows are the stored ones' in 8 bits with the float32 scale behind them, so that
planning, checking and moving need not know what a row means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import torch

from kvferry.core import ConfigError, DType, KVLayout
from kvferry.kvcache import KVPool
from kvferry.kvcache.rows import decode_rows, encode_rows

_SCALE_NBYTES = 4
_SMALLEST = 1e-30
"""Of the largest magnitude in a row: a row of zeros has a scale too."""


class WireFormat(Enum):
    """STORED: as it is in the pools. FP8: e4m3, about two digits of each number. INT8: steps of 1/127 of the largest
    magnitude in the row."""

    STORED = "stored"
    FP8 = "fp8"
    INT8 = "int8"


_DTYPES = {WireFormat.FP8: DType.FLOAT8, WireFormat.INT8: DType.INT8}
_FP8_LARGEST = 448.0


def wire_layouts(layouts: Sequence[KVLayout], wire: WireFormat) -> tuple[KVLayout, ...]:
    """Raises ConfigError for what has no rows of numbers, a state of a state-space layer, and for what has 8 bits."""
    return tuple(layouts) if wire is WireFormat.STORED else tuple(_quantised(layout, wire) for layout in layouts)


def _quantised(layout: KVLayout, wire: WireFormat) -> KVLayout:
    if layout.kind.is_state:
        raise ConfigError(
            f"transceiver.wire_format {wire.value} is for keys and values, and this model caches {layout.kind.value} "
            "states: set it to stored",
            field="transceiver.wire_format",
        )
    if layout.dtype.nbytes == 1:
        raise ConfigError(
            f"transceiver.wire_format {wire.value}: the cache has 8 bits already (kv_cache.dtype): set it to stored",
            field="transceiver.wire_format",
        )
    dtype = _DTYPES[wire]
    return replace(layout, dtype=dtype, head_dim=layout.head_dim + _SCALE_NBYTES - dtype.row_scale_nbytes)


def encode(stored: KVPool, blocks: Sequence[int], wire: KVPool, slots: Sequence[int]) -> None:
    """Fills `slots` of the wire pool with what `blocks` of the stored one hold."""
    rows = stored.view[torch.tensor(blocks, dtype=torch.int64)].float()
    packed = encode_rows(rows, DType.INT8).view(torch.uint8) if wire.layout.dtype is DType.INT8 else _fp8_rows(rows)
    wire.view.view(torch.uint8)[torch.tensor(slots, dtype=torch.int64)] = packed


def decode(wire: KVPool, slots: Sequence[int]) -> torch.Tensor:
    """What `slots` of a wire pool say: float32 in the order of the stored pool's view."""
    packed = wire.view.view(torch.uint8)[torch.tensor(slots, dtype=torch.int64)]
    if wire.layout.dtype is DType.INT8:
        return decode_rows(packed.view(torch.int8), DType.INT8, torch.float32)
    numbers = packed[..., :-_SCALE_NBYTES].contiguous().view(torch.float8_e4m3fn).float()
    return numbers * packed[..., -_SCALE_NBYTES:].contiguous().view(torch.float32)


def _fp8_rows(rows: torch.Tensor) -> torch.Tensor:
    """rows: float32 [..., head_dim]. uint8, each row's numbers and its scale behind them; pools of fp8 have none."""
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST) / _FP8_LARGEST
    numbers = (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([numbers, scales.view(torch.uint8)], -1)
