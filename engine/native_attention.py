"""One step of one layer group by the compiled kernels: straight over the blocks, nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.core import AxisOrder
from kvferry.engine.native import kernels
from kvferry.engine.spans import Span
from kvferry.kvcache import KVPool


class NativeGroupStep:
    """Over a pool of float32, bfloat16 or int8 in host memory, which must outlive the step. A sequence's results
    depend on nothing else in the batch, nor on the number of threads.

    rows: tokens of the step. step: what the kernels take.
    """

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        layout = pool.layout
        for span in spans:
            if span.blocks and not 0 <= min(span.blocks) <= max(span.blocks) < pool.num_blocks:
                raise ValueError(f"a block table names blocks outside the pool's {pool.num_blocks}")
        self.layout, self._pool = layout, pool.view
        head, token = layout.tokens_per_block * layout.row_nbytes, layout.row_nbytes
        if layout.axis_order is AxisOrder.TOKEN_HEAD:
            head, token = layout.row_nbytes, layout.kv_heads * layout.row_nbytes
        self.rows = sum(span.length for span in spans)
        self.step = kernels.AttentionStep(
            pool.view.data_ptr(),
            layout.dtype.value,
            layout.slot_nbytes,
            layout.plane_nbytes,
            head,
            token,
            layout.tokens_per_block,
            layout.window or 0,
            [block for span in spans for block in span.blocks],
            [
                (span.row, span.start - span.origin, span.length, span.lowest - span.origin, len(span.blocks))
                for span in spans
            ],
        )

    def attend(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        turn: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "these kernels have no sinks"
        heads, kv_heads, dim = q.shape[1], self.layout.kv_heads, self.layout.head_dim
        q, k, v = self._checked(q, heads), self._checked(k, kv_heads), self._checked(v, kv_heads)
        if heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
        if turn is not None and (turn.numel() != self.rows * dim // 2 or not turn.is_contiguous() or dim % 2):
            raise ValueError(f"turn must hold {self.rows} rows of {dim // 2}, got {tuple(turn.shape)}")
        out = torch.empty((self.rows, heads, dim))
        self.step.attend(
            index * self.layout.layer_nbytes,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            0 if turn is None else turn.data_ptr(),
            out.data_ptr(),
            heads,
            kv_heads,
            dim,
            scale,
            torch.get_num_threads(),
        )
        return out

    def _checked(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """x itself where the kernels can read it: float32, each row's heads side by side."""
        dim = self.layout.head_dim
        if x.shape != (self.rows, heads, dim) or x.dtype != torch.float32:
            raise ValueError(f"wanted float32 {self.rows, heads, dim}, got {x.dtype} {tuple(x.shape)}")
        return x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous()
