"""Rows of every type come back as near as their type allows, and their bytes are what layouts say."""

from __future__ import annotations

import pytest
import torch

from kvferry.core import DType, GroupKind, KVLayout
from kvferry.kvcache.rows import decode_rows, encode_rows


@pytest.mark.parametrize(
    ("dtype", "error"), [(DType.FLOAT32, 0.0), (DType.BFLOAT16, 2**-8), (DType.FLOAT16, 2**-11), (DType.INT8, 1 / 253)]
)
def test_a_round_trip(dtype: DType, error: float) -> None:
    x = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0.0
    rows = encode_rows(x, dtype)
    layout = KVLayout(GroupKind.FULL, (0,), 3, 24, dtype)
    assert rows.shape[-1] * rows.element_size() == layout.row_nbytes
    back = decode_rows(rows, dtype, torch.float32)
    assert bool(((back - x).abs() <= error * x.abs().amax(dim=-1, keepdim=True)).all())
    assert decode_rows(rows, dtype, torch.float64).dtype is torch.float64


def test_int8_rows_are_bytes_then_their_scale() -> None:
    rows = encode_rows(torch.tensor([[2.54, -1.27, 0.0, 0.01]]), DType.INT8)
    assert rows.shape == (1, 8)
    assert rows[0, :4].tolist() == [127, -64, 0, 0]
    assert float(rows[0, 4:].view(torch.float32)) == pytest.approx(0.02)
    torch.testing.assert_close(
        decode_rows(rows, DType.INT8, torch.float32), torch.tensor([[2.54, -1.28, 0.0, 0.0]]), rtol=1e-6, atol=1e-6
    )


def test_a_page_of_set_bits_is_not_a_number() -> None:
    rows = torch.full((2, 12), -1, dtype=torch.int8)
    assert bool(decode_rows(rows, DType.INT8, torch.float32).isnan().all())
