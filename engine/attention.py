"""Attention over the paged cache: by the compiled kernels where they can serve, else in device-neutral torch.

The index tensors of a step are built once and serve every layer. Sequences that compute one token are batched:
their blocks are gathered and attended in one go. A longer chunk is attended alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvferry.core import AxisOrder, DType, GroupKind
from kvferry.engine.kernels import Kernels, use_native, use_triton
from kvferry.engine.kv_rows import RowWriter
from kvferry.engine.spans import AttentionChunk, Span, lowest_attended, spans_of
from kvferry.kvcache import KVPool
from kvferry.kvcache.rows import decode_rows, encode_rows
from kvferry.models.rope import rotate

if TYPE_CHECKING:
    from kvferry.engine.native.kernels import AttentionStep
    from kvferry.engine.native_attention import NativeGroupStep


class PagedAttention:
    """`models.Attention`, bound to one step. `pools` and each chunk's tables are in layer-group order; groups of
    states are left to `PagedStates`.

    Pages may hold anything, NaN too, where nothing was written yet: such positions never reach a result.
    """

    def __init__(
        self, pools: Sequence[KVPool], chunks: Sequence[AttentionChunk], kernels: Kernels = Kernels.AUTO
    ) -> None:
        self.rows = sum(chunk.length for chunk in chunks)
        self._where = {
            layer: (group, index)
            for group, pool in (
                (_Group(pool, chunks, group, kernels), pool)
                for group, pool in enumerate(pools)
                if not pool.layout.kind.is_state
            )
            for index, layer in enumerate(pool.layout.layers)
        }

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        turn: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group, index = self._where[layer]
        step = group.step if sinks is None else group.sink_step
        return step.attend(index, q, k, v, scale, turn, sinks)

    def native_places(
        self, layers: Sequence[int], shapes: Sequence[tuple[int, int]]
    ) -> list[tuple[AttentionStep, int]] | None:
        """For kernels that attend by themselves: of each layer its group's step and its offset there, in bytes. None
        where a layer is not attended by the compiled kernels. shapes: KV heads and their size; raises ValueError where
        a pool has others."""
        places = []
        for layer, shape in zip(layers, shapes, strict=True):
            group, index = self._where[layer]
            if group.native is None:
                return None
            layout = group.native.layout
            if shape != (layout.kv_heads, layout.head_dim):
                raise ValueError(f"layer {layer} has KV heads {shape}, its pool {layout.kv_heads, layout.head_dim}")
            places.append((group.native.step, index * layout.layer_nbytes))
        return places


class _Group:
    """One layer group of the step. native: None where the compiled kernels do not run. sink_step: for layers whose
    softmax has a sink, which the CPU's kernels lack."""

    def __init__(self, pool: KVPool, chunks: Sequence[AttentionChunk], group: int, kernels: Kernels) -> None:
        self._pool, self._spans = pool, spans_of(pool.layout, chunks, group)
        self.step: GroupStep
        self.native = self._native_step() if _runs_native(pool, kernels) else None
        if self.native is not None:
            self.step = self.native
        elif _runs_triton(pool, kernels):
            self.step = self.sink_step = self._triton_step()
        else:
            self.step = self.sink_step

    def _native_step(self) -> NativeGroupStep:
        from kvferry.engine.native_attention import NativeGroupStep

        return NativeGroupStep(self._pool, self._spans)

    def _triton_step(self) -> GroupStep:
        from kvferry.engine.triton_attention import TritonGroupStep

        return TritonGroupStep(self._pool, self._spans)

    @cached_property
    def sink_step(self) -> GroupStep:
        return _TorchGroupStep(self._pool, self._spans)


def _runs_native(pool: KVPool, kernels: Kernels) -> bool:
    """The compiled kernels know K and V of some types, and no chunks."""
    layout = pool.layout
    known = layout.planes == 2 and layout.kind in (GroupKind.FULL, GroupKind.WINDOW)
    return known and layout.dtype in _NATIVE_DTYPES and use_native(kernels, pool.view.device)


def _runs_triton(pool: KVPool, kernels: Kernels) -> bool:
    if not use_triton(kernels, pool.view.device):
        return False
    from kvferry.engine.triton_attention import can_attend

    return can_attend(pool.layout)


_NATIVE_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.INT8)


class GroupStep(Protocol):
    """One step of one layer group."""

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
        """index: the layer's place in the group; all else as `models.Attention` has it."""
        ...


class _TorchGroupStep:
    """By gathering blocks and torch's scaled dot product."""

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        self._planes = pool.layout.planes
        self._writer = RowWriter(pool, spans)
        singles = [span for span in spans if span.length == 1]
        batches = decode_batches([len(span.blocks) for span in singles])
        self._decodes = [_DecodeBatch(pool, [singles[index] for index in batch]) for batch in batches]
        self._chunks = [_LongChunk(pool, span) for span in spans if span.length > 1]

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
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        v = k if self._planes == 1 else v
        self._writer.write(index, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for batch in self._decodes:
            out[batch.rows] = batch.attend(index, q[batch.rows], scale, sinks)
        for chunk in self._chunks:
            out[chunk.rows] = chunk.attend(index, q[chunk.rows], k[chunk.rows], v[chunk.rows], scale, sinks)
        return out


_CALL_COST_BLOCKS = 32
"""What one more gather and attention call costs, in blocks gathered for nothing (about 0.1 ms on two cores)."""


def decode_batches(block_counts: Sequence[int]) -> list[list[int]]:
    """Which sequences are attended together: indices into `block_counts`, longest first.

    A batch is padded to its longest, so the shorter rest goes into a batch of its own once that saves more padding
    than a call costs.
    """
    order = sorted(range(len(block_counts)), key=lambda index: -block_counts[index])
    batches: list[list[int]] = []
    for done, index in enumerate(order):
        longest = block_counts[batches[-1][0]] if batches else 0
        saved = (longest - block_counts[index]) * (len(order) - done)
        if not batches or saved > _CALL_COST_BLOCKS:
            batches.append([index])
        else:
            batches[-1].append(index)
    return [sorted(batch) for batch in batches]


class _Gather:
    """Copies the blocks of several spans side by side, as K and V of [spans, kv_heads, tokens, head_dim].

    valid: bool [spans, tokens], what a span's first token may attend to. What is not valid is finite all the same,
    since masking cannot undo a NaN: holes (slots not written yet, or stale) are zeroed, and a span shorter than the
    longest is padded with its second block, which lies between both kinds of hole. Spans of less than three blocks
    have no whole one, so their padding counts as a hole.
    """

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        layout, block, device = pool.layout, pool.layout.tokens_per_block, pool.view.device
        self._layout, self._spans, self._width = layout, len(spans), pool.view.shape[-1]
        self._blocks = max(len(span.blocks) for span in spans)
        padded = [span.blocks + span.blocks[:2][-1:] * (self._blocks - len(span.blocks)) for span in spans]
        slots = torch.tensor(padded, dtype=torch.int64, device=device) * (len(layout.layers) * layout.planes)
        planes = slots + torch.arange(layout.planes, device=device).view(-1, 1, 1)
        self._heads_first = layout.axis_order is AxisOrder.HEAD_TOKEN
        if self._heads_first:
            heads = torch.arange(layout.kv_heads, device=device).view(-1, 1)
            self._units = (planes.unsqueeze(2) * layout.kv_heads + heads).flatten()
            self._pool = pool.view.view(-1, block * self._width)
        else:
            self._units = planes.flatten()
            self._pool = pool.view.view(-1, block * layout.kv_heads * self._width)
        self._layer_units = layout.planes * (layout.kv_heads if self._heads_first else 1)
        # One buffer for all layers: fresh pages for each would cost more than the copy.
        self._copy = torch.empty((len(self._units), self._pool.shape[1]), dtype=self._pool.dtype, device=device)
        self.positions = torch.arange(self._blocks * block, device=device)
        lowest = torch.tensor([[span.lowest - span.origin] for span in spans], device=device)
        stop = torch.tensor([[span.stop - span.origin] for span in spans], device=device)
        filled = [len(span.blocks) if len(span.blocks) >= 3 else self._blocks for span in spans]
        filled_stop = torch.tensor(filled, device=device).view(-1, 1) * block
        self.valid = (self.positions >= lowest) & (self.positions < stop)
        self._holes = self._hole_rows((~self.valid & (self.positions < filled_stop)).nonzero())

    def _hole_rows(self, holes: torch.Tensor) -> torch.Tensor:
        """holes: int64 [n, 2], span and token. Their rows in the copy."""
        heads = torch.arange(self._layout.kv_heads, device=holes.device)
        planes = torch.arange(self._layout.planes, device=holes.device).view(-1, 1, 1)
        spans = planes * self._spans + holes[:, :1]
        tokens, size, count = holes[:, 1:], len(heads), len(self.positions)
        rows = (spans * size + heads) * count + tokens if self._heads_first else (spans * count + tokens) * size + heads
        return rows.flatten()

    def read(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer (one tensor where the cache has one plane); valid until the next read."""
        torch.index_select(self._pool, 0, self._units + index * self._layer_units, out=self._copy)
        layout = self._layout
        self._copy.view(-1, self._width).index_fill_(0, self._holes, 0)
        if self._heads_first:
            shape = (layout.planes, self._spans, layout.kv_heads, len(self.positions), self._width)
            both = decode_rows(self._copy.view(shape), layout.dtype, dtype)
        else:
            shape = (layout.planes, self._spans, len(self.positions), layout.kv_heads, self._width)
            both = decode_rows(self._copy.view(shape).transpose(2, 3), layout.dtype, dtype)
        return both[0], both[-1]


class _DecodeBatch:
    """Sequences that compute one token each. The heads that share a KV head stand in for query positions."""

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        self.rows = _rows([span.row for span in spans], pool.view.device)
        self._gather = _Gather(pool, spans)
        self._mask = _additive(self._gather.valid.view(len(spans), 1, 1, -1))

    def attend(self, index: int, q: torch.Tensor, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
        k, v = self._gather.read(index, q.dtype)
        grouped, mask = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2]), self._mask.to(q.dtype)
        if sinks is not None:
            grouped, k, v, mask = with_sinks(grouped, k, v, mask, sinks.view(1, k.shape[1], -1, 1), scale)
        mixed = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return mixed[..., : q.shape[2]].reshape(q.shape)


class _LongChunk:
    """Several tokens of one sequence. A first chunk attends to itself alone and reads nothing back."""

    def __init__(self, pool: KVPool, span: Span) -> None:
        layout, device = pool.layout, pool.view.device
        self.rows = slice(span.row, span.row + span.length)
        self._stored = layout.dtype
        self._gather = _Gather(pool, [span]) if span.start > 0 else None
        self._mask: torch.Tensor | None = None
        if self._gather is not None or (layout.window is not None and layout.window < span.length):
            keys = torch.arange(span.length, device=device) if self._gather is None else self._gather.positions
            queries = torch.arange(span.start - span.origin, span.stop - span.origin, device=device).view(-1, 1)
            lowest = [lowest_attended(layout, position) - span.origin for position in range(span.start, span.stop)]
            allowed = (keys <= queries) & (keys >= torch.tensor(lowest, device=device).view(-1, 1))
            self._mask = _additive(allowed)

    def attend(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._gather is None:
            # Through the stored type, so that a prompt computed whole equals one computed in chunks.
            k, v = (decode_rows(encode_rows(x, self._stored), self._stored, q.dtype).transpose(0, 1) for x in (k, v))
        else:
            k, v = (x[0] for x in self._gather.read(index, q.dtype))
        length, heads, dim = q.shape
        share = heads // k.shape[0]
        grouped = q.view(length, k.shape[0], share, dim).permute(1, 2, 0, 3)
        k, v = (x.unsqueeze(1).expand(-1, share, -1, -1) for x in (k, v))
        mask = self._mask
        if sinks is not None:
            mask = _additive(torch.ones(length, length, device=q.device).tril() > 0) if mask is None else mask
            grouped, k, v, mask = with_sinks(grouped, k, v, mask, sinks.view(-1, share, 1, 1), scale)
        mixed = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return mixed[..., :dim].permute(2, 0, 1, 3).reshape(q.shape)


_SINK_DIMS = 8
"""One would do; kernels like head dims that are multiples of 8."""


def with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, mask with one more key whose score is the head's sink and whose value is nothing.

    q: [..., queries, dim]; k, v: [..., keys, dim]; mask: additive, [..., queries, keys]; sinks: broadcast to
    [..., queries, 1]. The sink is a coordinate of its own, in which q holds it and only the new key is not 0: so any
    attention kernel serves, and no mask per head is needed. The results have `_SINK_DIMS` more dimensions, all 0.
    """
    q, k, v = (torch.nn.functional.pad(x, (0, _SINK_DIMS)) for x in (q, k, v))
    dim = q.shape[-1] - _SINK_DIMS
    q[..., dim] = sinks.to(q.dtype).expand(*q.shape[:-1], 1).squeeze(-1) / scale
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    k[..., -1, dim] = 1.0
    return q, k, v, torch.nn.functional.pad(mask, (0, 1))


def _additive(allowed: torch.Tensor) -> torch.Tensor:
    """0 where attention is allowed, -inf elsewhere; given as booleans it would be converted again by every layer."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def _rows(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice where they are consecutive: indexing with it copies nothing."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)
