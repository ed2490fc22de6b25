"""A step's rows of K and V in their pool, in torch. A *row* is one token of one head of one plane."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.core import AxisOrder
from kvferry.engine.spans import Span
from kvferry.kvcache import KVPool
from kvferry.kvcache.rows import encode_rows


class RowWriter:
    """Puts a step's K and V where its tokens go."""

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        layout, block = pool.layout, pool.layout.tokens_per_block
        device = pool.view.device
        positions = [position - span.origin for span in spans for position in range(span.start, span.stop)]
        owners = [span for span in spans for _ in range(span.length)]
        slots = [span.blocks[position // block] for span, position in zip(owners, positions, strict=True)]
        first = torch.tensor(slots, dtype=torch.int64, device=device) * (len(layout.layers) * layout.planes)
        offset = torch.tensor([position % block for position in positions], dtype=torch.int64, device=device)
        planes = torch.arange(layout.planes, device=device).view(-1, 1, 1)
        heads = torch.arange(layout.kv_heads, device=device)
        first = (planes + first.view(-1, 1)) * layout.kv_heads * block
        offset = offset.view(-1, 1)
        heads_first = layout.axis_order is AxisOrder.HEAD_TOKEN
        inner = heads * block + offset if heads_first else offset * layout.kv_heads + heads
        self._rows = (first + inner).flatten()
        self._layer_rows = layout.planes * layout.kv_heads * block
        self._pool = pool.view.view(-1, pool.view.shape[-1])
        self._planes, self._stored = layout.planes, layout.dtype

    def write(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """index: the layer's place in its group. v is not looked at where the cache has one plane."""
        source = torch.stack((k, v)[: self._planes]).view(-1, k.shape[-1])
        self._pool.index_copy_(0, self._rows + index * self._layer_rows, encode_rows(source, self._stored))
