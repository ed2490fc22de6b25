"""One step of one layer group as a Triton kernel: straight over the blocks, on a GPU, or in Triton's interpreter.

A *tile* is some tokens of one span against a range of positions; one program computes a tile for one KV head. A
decoding sequence is cut into stretches of positions whose results are merged, so that few sequences fill a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl

from kvferry.core import AxisOrder, DType, GroupKind, KVLayout
from kvferry.engine.kv_rows import RowWriter
from kvferry.engine.spans import Span, lowest_attended
from kvferry.kvcache import KVPool
from kvferry.models.rope import rotate

STRETCH = 512
"""Positions of a decoding sequence that one program takes: the same in every batch, and so is what is computed."""

_CHUNK_ROWS = 64
"""Query rows of a longer chunk's tile: tokens times the heads that share a KV head."""

_LEAST_ROWS = 16  # what a matrix product on a GPU wants
_MOST_DIM = 256
_KEYS = 64
_TILE_FIELDS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _rows_at(pool, scales, place, places, inside, dim: tl.constexpr, scaled: tl.constexpr):  # type: ignore[no-untyped-def]
    """[keys, padded_dim] from the elements that start at `place` [keys]; zeros where there are none."""
    known = inside[:, None] & (places < dim)[None, :]
    x = tl.load(pool + place[:, None] + places[None, :], mask=known, other=0.0)
    if scaled:
        x = x.to(tl.float32) * tl.load(scales + (place + dim) // 4, mask=inside, other=0.0)[:, None]
    return x


@triton.jit
def _soften(scores, top, total):  # type: ignore[no-untyped-def]
    """One step of a running softmax: the shares, what earlier sums shrink by, the new maximum and total."""
    best = tl.maximum(top, tl.max(scores, 1))
    reference = tl.where(best == float("-inf"), 0.0, best)  # rows that have seen nothing yet
    shrink = tl.exp(top - reference)
    shares = tl.exp(scores - reference[:, None])
    return shares, shrink, best, total * shrink + tl.sum(shares, 1)


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, q_stride,  # [tokens, heads, dim]
    pool, scales,  # its elements, which all strides below count; the same as float32, for rows with a scale
    tables, tiles,  # int64: the blocks of all spans; [tiles, fields of _Tile]
    sinks,  # [heads]
    out, totals,  # float32 [parts, tokens, heads, dim]; [parts, tokens, heads], log of what the softmax divides by
    layer_offset, slot_stride, plane_stride, head_stride, token_stride,
    tokens, heads, window, scale,  # window 0: none
    fields: tl.constexpr, share: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, padded_dim: tl.constexpr,
    rows: tl.constexpr, keys: tl.constexpr, chunked: tl.constexpr, scaled: tl.constexpr, has_sinks: tl.constexpr,
):
    # fmt: on
    tile, kv_head = tiles + tl.program_id(0) * fields, tl.program_id(1)
    first_row, first_position, count, table = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    origin, start, stop, part = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)
    row, places = tl.arange(0, rows), tl.arange(0, padded_dim)
    token, head = row // share, kv_head * share + row % share
    used, position = token < count, first_position + token
    in_row = used[:, None] & (places < dim)[None, :]
    if chunked:
        lowest = (position + origin) // window * window - origin
    else:
        lowest = tl.where(window > 0, position + 1 - window, start)
    q_rows = q + (first_row + token) * q_stride + head * dim
    queries = tl.load(q_rows[:, None] + places[None, :], mask=in_row, other=0.0)

    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if has_sinks:  # one more score, in the first part
        top = tl.where(part == 0, tl.load(sinks + head, mask=used, other=0.0).to(tl.float32), top)
        total = tl.where(part == 0, 1.0, total)
    mixed = tl.zeros([rows, padded_dim], tl.float32)
    for first in range(start, stop, keys):
        key = first + tl.arange(0, keys)
        inside = key < stop
        slot = tl.load(tables + table + key // block, mask=inside, other=0)
        place = slot * slot_stride + layer_offset + kv_head * head_stride + (key % block) * token_stride
        k = _rows_at(pool, scales, place, places, inside, dim, scaled).to(queries.dtype)
        v = _rows_at(pool, scales, place + plane_stride, places, inside, dim, scaled).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        allowed = inside[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] >= lowest[:, None])
        scores = tl.where(allowed & used[:, None], scores, float("-inf"))
        shares, shrink, top, total = _soften(scores, top, total)
        mixed = mixed * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    result = (part * tokens + first_row + token) * heads + head
    tl.store(out + result[:, None] * dim + places[None, :], mixed, mask=in_row)
    tl.store(totals + result, top + tl.log(total), mask=used)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Positions count from the span's first block. row: of the step; table: where the span's blocks start; part: which
    of the results that are merged."""

    row: int
    position: int
    count: int
    table: int
    origin: int
    start: int
    stop: int
    part: int


class _Launch:
    """Tiles of one height, their tensors on the device. tokens: the first one of each tile; all, where each has one."""

    def __init__(self, tiles: Sequence[_Tile], rows: int, device: torch.device) -> None:
        self.rows, self.count = max(_LEAST_ROWS, triton.next_power_of_2(rows)), len(tiles)
        self.parts = 1 + max(tile.part for tile in tiles)
        self.tokens = torch.tensor(sorted({tile.row for tile in tiles}), device=device)
        self.tiles = torch.tensor([astuple(tile) for tile in tiles], dtype=torch.int64, device=device)


def can_attend(layout: KVLayout) -> bool:
    """Whether a tile fits into a GPU's registers, and scales of int8 rows stand at whole words."""
    return layout.head_dim <= _MOST_DIM and (layout.dtype is not DType.INT8 or layout.head_dim % 4 == 0)


class TritonGroupStep:
    """Adds up in float32 and returns q's type. A row's results depend on nothing else in the batch. The pool, one that
    `can_attend` accepts, must outlive the step."""

    def __init__(self, pool: KVPool, spans: Sequence[Span]) -> None:
        layout, device = pool.layout, pool.view.device
        self._pool, self._writer = pool, RowWriter(pool, spans)
        self._tokens = sum(span.length for span in spans)
        offsets = [sum(len(span.blocks) for span in spans[:index]) for index in range(len(spans))]
        blocks = [block for span in spans for block in span.blocks]
        self._tables = torch.tensor(blocks or [0], dtype=torch.int64, device=device)
        self._spans = list(zip(spans, offsets, strict=True))
        self._launches: dict[int, list[_Launch]] = {}
        row = layout.row_nbytes // layout.dtype.nbytes
        heads_first = layout.axis_order is AxisOrder.HEAD_TOKEN
        self._head_stride = layout.tokens_per_block * row if heads_first else row
        self._token_stride = row if heads_first else layout.kv_heads * row

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
        self._writer.write(index, k, v)
        q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
        launches = self._launches_for(q.shape[1] // self._pool.layout.kv_heads)
        out = q.new_empty(q.shape, dtype=torch.float32)
        for launch in launches:
            self._run(launch, index, q, scale, sinks, out)
        return out.to(q.dtype)

    def _run(
        self,
        launch: _Launch,
        index: int,
        q: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Fills the launch's rows of `out`."""
        layout, (tokens, heads, dim) = self._pool.layout, q.shape
        merging = launch.parts > 1
        results = out.new_zeros((launch.parts, *out.shape)) if merging else out.unsqueeze(0)
        totals = out.new_full((launch.parts, tokens, heads), float("-inf"))
        scaled, nbytes = layout.dtype is DType.INT8, layout.dtype.nbytes
        _attend[(launch.count, layout.kv_heads)](
            q,
            q.stride(0),
            self._pool.view,
            self._pool.buffer.view(torch.float32) if scaled else self._pool.view,
            self._tables,
            launch.tiles,
            q if sinks is None else sinks,
            results,
            totals,
            index * layout.layer_nbytes // nbytes,
            layout.slot_nbytes // nbytes,
            layout.plane_nbytes // nbytes if layout.planes == 2 else 0,
            self._head_stride,
            self._token_stride,
            tokens,
            heads,
            layout.window or 0,
            scale,
            fields=_TILE_FIELDS,
            share=heads // layout.kv_heads,
            block=layout.tokens_per_block,
            dim=dim,
            padded_dim=max(_LEAST_ROWS, triton.next_power_of_2(dim)),
            rows=launch.rows,
            keys=_KEYS,
            chunked=layout.kind is GroupKind.CHUNKED,
            scaled=scaled,
            has_sinks=sinks is not None,
        )
        if merging:
            shares = totals[:, launch.tokens].softmax(dim=0).unsqueeze(-1)
            out[launch.tokens] = (results[:, launch.tokens] * shares).sum(dim=0)

    def _launches_for(self, share: int) -> list[_Launch]:
        """Decoding sequences, then longer chunks: once per number of heads that share a KV head."""
        if share not in self._launches:
            device, height = self._pool.view.device, max(1, _CHUNK_ROWS // share)
            single = [tile for span, table in self._spans if span.length == 1 for tile in _stretches(span, table)]
            longer = [t for span, table in self._spans if span.length > 1 for t in self._cut(span, table, height)]
            given = ((single, share), (longer, height * share))
            self._launches[share] = [_Launch(tiles, rows, device) for tiles, rows in given if tiles]
        return self._launches[share]

    def _cut(self, span: Span, table: int, height: int) -> list[_Tile]:
        tiles = []
        for first in range(0, span.length, height):
            position, count = span.start + first, min(height, span.length - first)
            start = lowest_attended(self._pool.layout, position) - span.origin
            stop = position + count - span.origin
            tiles.append(
                _Tile(span.row + first, position - span.origin, count, table, span.origin, max(0, start), stop, 0)
            )
        return tiles


def _stretches(span: Span, table: int) -> list[_Tile]:
    position, lowest = span.start - span.origin, span.lowest - span.origin
    starts = range(lowest, position + 1, STRETCH)
    return [
        _Tile(span.row, position, 1, table, span.origin, start, min(start + STRETCH, position + 1), part)
        for part, start in enumerate(starts)
    ]
