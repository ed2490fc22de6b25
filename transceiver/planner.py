"""Which bytes of one rank's pools belong where in another's: a pure function of layouts, block tables and a range.

Planning is by token position, never by block count: the two sides may have different block sizes, axis orders, heads
and layers (`shares.py`). Whoever submits the copies, they go from the source to the destination.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core import AxisOrder, BlockTable, GroupKind, KVLayout, MemRegion, RankInfo, TokenRange, TransferError
from kvferry.transceiver.base import CopyArray
from kvferry.transceiver.shares import GroupShare, group_shares

_Ints = npt.NDArray[np.int64]
GENERATION_NBYTES = 8


@dataclass(frozen=True, slots=True)
class RankTables:
    """A rank and one request's blocks on it, one table per layout."""

    rank: RankInfo
    tables: tuple[BlockTable, ...]


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """The positions that move of one share of a layer group."""

    share: GroupShare
    tokens: TokenRange


@dataclass(frozen=True, slots=True, eq=False)
class GenerationReads:
    """Where the source's generation words of the blocks read stand, and what they must be. Both are u64 [blocks]."""

    addresses: npt.NDArray[np.uint64]
    expected: npt.NDArray[np.uint64]

    def copies(self, local_addr: int) -> CopyArray:
        """Reads every word, in order, to consecutive u64 from `local_addr` on."""
        count = len(self.addresses)
        local = local_addr + GENERATION_NBYTES * np.arange(count, dtype=np.int64)
        nbytes = np.full(count, GENERATION_NBYTES, dtype=np.int64)
        return _coalesce(local, self.addresses.astype(np.int64), nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """What moves between two ranks. Empty when the range is, or one has nothing for the other.

    copies: [destination address, source address, bytes], as the destination reads them.
    """

    spans: tuple[GroupSpan, ...]
    copies: CopyArray
    nbytes: int

    @property
    def writes(self) -> CopyArray:
        """The copies as the source writes them: [source address, destination address, bytes]."""
        return self.copies[:, [1, 0, 2]]


def plan_transfer(
    source: RankTables, destination: RankTables, tokens: TokenRange, *, horizon: int | None = None
) -> TransferPlan:
    """The copies touch each byte once and are as few as can be: each is as long as both sides are contiguous.

    horizon: the position at which the destination goes on, where `tokens` is only a part of what it gets (None: where
    they end); a sliding window needs nothing that lies further back. Raises TransferError when the layouts do not
    match, a table does not cover the range, or a block id is outside its pool.
    """
    spans = group_spans(source, destination, tokens, horizon=horizon)
    parts = [_span_copies(source, destination, span) for span in spans]
    copies = np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.uint64)
    nbytes = int(copies[:, 2].sum())
    for side, groups in (
        (source, [span.share.source_group for span in spans]),
        (destination, [span.share.destination_group for span in spans]),
    ):
        expected = sum(
            span_nbytes(side.rank.layouts[group], span.share, span.tokens)
            for group, span in zip(groups, spans, strict=True)
        )
        if expected != nbytes:
            raise TransferError(
                f"{side.rank.worker} expects {expected} bytes for positions {_show(tokens)}, the plan has {nbytes}"
            )
    return TransferPlan(spans=spans, copies=copies, nbytes=nbytes)


def arrives_in_part(plan: TransferPlan, destination: RankInfo, tokens: TokenRange) -> bool:
    """Whether, of the `tokens` asked for, a block of the destination is filled from its middle on only: the source has
    smaller blocks, and gave up those that a sliding window had passed. No token of this request looks there; one of
    another request, which goes on from an earlier position, would."""
    layouts = [destination.layouts[span.share.destination_group] for span in plan.spans]
    return any(
        span.tokens.start != tokens.start and span.tokens.start % layout.tokens_per_block and not layout.kind.is_state
        for span, layout in zip(plan.spans, layouts, strict=True)
    )


def plan_generation_reads(source: RankTables, plan: TransferPlan) -> GenerationReads:
    """The generation word of every block of `source` that the plan reads, each once."""
    blocks: dict[int, list[tuple[_Ints, npt.NDArray[np.uint64]]]] = defaultdict(list)
    for span in plan.spans:
        group = span.share.source_group
        layout, table = source.rank.layouts[group], source.tables[group]
        if len(table.generations) != len(table.block_ids):
            raise TransferError(f"layer group {group}: the handle lacks generations")
        used = _blocks_used(layout, table, span.tokens)
        ids = np.asarray(table.block_ids[used], dtype=np.int64)
        blocks[group].append((ids, np.asarray(table.generations[used], dtype=np.uint64)))
    addresses, expected = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint64)]
    for group, parts in blocks.items():
        ids, firsts = np.unique(np.concatenate([ids for ids, _ in parts]), return_index=True)
        addresses.append(source.rank.generations[group].addr + GENERATION_NBYTES * ids)
        expected.append(np.concatenate([generations for _, generations in parts])[firsts])
    return GenerationReads(np.concatenate(addresses).astype(np.uint64), np.concatenate(expected))


def group_spans(
    source: RankTables, destination: RankTables, tokens: TokenRange, *, horizon: int | None = None
) -> tuple[GroupSpan, ...]:
    """What of `tokens` moves in each share: all of it, less what a sliding window has dropped on either side, or will
    have at the horizon. Of a window whose table at the destination begins blocks before `tokens`, these move too."""
    if not len(tokens):
        return ()
    for name, side in (("source", source), ("destination", destination)):
        if len(side.tables) != len(side.rank.layouts):
            raise TransferError(f"{len(side.tables)} {name} block tables for {len(side.rank.layouts)} layer groups")
    spans = []
    for share in group_shares(source.rank, destination.rank):
        layout = destination.rank.layouts[share.destination_group]
        if layout.kind.is_state:
            spans.append(GroupSpan(share, tokens))
            continue
        held = max(_first_position(source, share.source_group), _first_position(destination, share.destination_group))
        table = destination.tables[share.destination_group]
        begin = lacks_from(layout, table, tokens) if horizon is None else tokens.start
        start = max(begin, held)
        needed = max(begin, oldest_needed(layout, tokens.stop if horizon is None else horizon))
        if start > needed and needed < tokens.stop:
            raise TransferError(
                f"layer group {share.destination_group}: positions [{needed}, {start}) are needed but no longer held"
            )
        start = start if horizon is None else needed
        if start < tokens.stop:
            spans.append(GroupSpan(share, TokenRange(start, tokens.stop)))
    return tuple(spans)


def expected_nbytes(source: RankTables, reader: RankInfo, tokens: TokenRange) -> tuple[int, int]:
    """The fewest and the most bytes that `reader` may take of `tokens`, as the source reckons. They differ only where
    a sliding window lets the reader leave out positions that its next token cannot see, or lacks some before `tokens`
    that it can."""
    least = most = 0
    for share in group_shares(source.rank, reader) if len(tokens) else ():
        layout, held = source.rank.layouts[share.source_group], _first_position(source, share.source_group)
        oldest = oldest_needed(layout, tokens.stop)
        size = reader.layouts[share.destination_group].tokens_per_block
        furthest = tokens.start if layout.window is None else min(tokens.start, oldest // size * size)
        needed = max(tokens.start, held, oldest)
        most += span_nbytes(layout, share, TokenRange(min(max(held, furthest), tokens.stop), tokens.stop))
        least += span_nbytes(layout, share, TokenRange(min(needed, tokens.stop), tokens.stop))
    return least, most


def lacks_from(layout: KVLayout, table: BlockTable, tokens: TokenRange) -> int:
    """The position that a load of `tokens` into `table` begins with: theirs, or, where the table of a window begins
    blocks before them, that of the first block which the token behind them looks back to."""
    size = layout.tokens_per_block
    if layout.window is None or table.first_block * size > tokens.start - size:
        return tokens.start
    oldest = oldest_needed(layout, tokens.stop) // size
    return min(tokens.start, max(table.first_block, oldest) * size)


def oldest_needed(layout: KVLayout, next_position: int) -> int:
    """The first position that the token at `next_position` looks back to in this group."""
    if layout.window is None:
        return 0
    if layout.kind is GroupKind.CHUNKED:
        return next_position // layout.window * layout.window
    return max(0, next_position - layout.window + 1)


def span_nbytes(layout: KVLayout, share: GroupShare, tokens: TokenRange) -> int:
    """What one side expects to move for `tokens` of a share: the sum both compare. A state moves whole."""
    rows = layout.tokens_per_block if layout.kind.is_state else len(tokens)
    return rows * len(share.layers) * layout.planes * len(share.heads) * layout.row_nbytes


# -- one share of a group ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """One layer group of one rank, and the request's table in it. name: which side it is, for errors."""

    name: str
    layout: KVLayout
    pool: MemRegion
    table: BlockTable

    @classmethod
    def of(cls, name: str, side: RankTables, group: int) -> _Side:
        return cls(name, side.rank.layouts[group], side.rank.pools[group], side.tables[group])

    @property
    def token_stride(self) -> int:
        layout = self.layout
        return layout.row_nbytes * (1 if layout.axis_order is AxisOrder.HEAD_TOKEN else layout.kv_heads)

    @property
    def head_stride(self) -> int:
        layout = self.layout
        return layout.row_nbytes * (layout.tokens_per_block if layout.axis_order is AxisOrder.HEAD_TOKEN else 1)

    def token_addresses(self, starts: _Ints) -> _Ints:
        """Where each position's first row (first layer, plane and head) stands."""
        layout = self.layout
        ids = self._ids_at(starts)
        count = self.pool.nbytes // layout.slot_nbytes
        # Ids come from a peer: an address computed from a wrong one would be anybody's memory.
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
            raise TransferError(f"a {self.name} block id is outside its pool of {count} blocks")
        addresses: _Ints = (
            self.pool.addr + ids * layout.slot_nbytes + starts % layout.tokens_per_block * self.token_stride
        )
        return addresses

    def _ids_at(self, starts: _Ints) -> _Ints:
        """The block id that holds each position."""
        layout, table = self.layout, self.table
        ids = np.asarray(table.block_ids, dtype=np.int64)
        if layout.kind.is_state:
            return ids[_blocks_used(layout, table, TokenRange(0, 0))]
        index = starts // layout.tokens_per_block - table.first_block
        if len(index) and (index[0] < 0 or index[-1] >= len(ids)):
            stop = (table.first_block + len(ids)) * layout.tokens_per_block
            held = f"[{table.first_block * layout.tokens_per_block}, {stop})"
            raise TransferError(
                f"the {self.name} block table holds positions {held}, position {int(starts[-1])} is wanted"
            )
        found: _Ints = ids[index]
        return found

    def inner_offsets(self, share: GroupShare, tokens: int) -> tuple[_Ints, ...]:
        """Bytes from a position's first row to those of each token, head, plane and layer of the share."""
        layout = self.layout
        places = {layer: place for place, layer in enumerate(layout.layers)}
        return (
            np.arange(tokens, dtype=np.int64) * self.token_stride,
            (np.asarray(share.heads, dtype=np.int64) - layout.first_head) * self.head_stride,
            np.arange(layout.planes, dtype=np.int64) * layout.plane_nbytes,
            np.asarray([places[layer] for layer in share.layers], dtype=np.int64) * layout.layer_nbytes,
        )


def _span_copies(source: RankTables, destination: RankTables, span: GroupSpan) -> CopyArray:
    share = span.share
    there = _Side.of("source", source, share.source_group)
    here = _Side.of("destination", destination, share.destination_group)
    if here.layout.kind.is_state:
        starts, lengths = np.zeros(1, dtype=np.int64), np.full(1, here.layout.tokens_per_block, dtype=np.int64)
    else:
        starts, lengths = _segments(span.tokens, here.layout.tokens_per_block, there.layout.tokens_per_block)
    to, origin = here.token_addresses(starts), there.token_addresses(starts)
    parts = []
    for length in np.unique(lengths):
        chosen = lengths == length
        axes = list(zip(here.inner_offsets(share, int(length)), there.inner_offsets(share, int(length)), strict=True))
        parts.append(_outer_sum(to[chosen], origin[chosen], axes, here.layout.row_nbytes))
    rows = np.concatenate(parts)
    return _coalesce(rows[:, 0], rows[:, 1], rows[:, 2])


def _segments(tokens: TokenRange, block: int, other_block: int) -> tuple[_Ints, _Ints]:
    """Cuts a range at the block boundaries of both sides: (starts, lengths)."""
    cuts = [np.asarray([tokens.start, tokens.stop], dtype=np.int64)]
    cuts += [
        np.arange(-(-tokens.start // size) * size, tokens.stop, size, dtype=np.int64) for size in {block, other_block}
    ]
    bounds = np.sort(np.concatenate(cuts))
    lengths = np.diff(bounds)
    return bounds[:-1][lengths > 0], lengths[lengths > 0]


def _outer_sum(to: _Ints, origin: _Ints, axes: list[tuple[_Ints, _Ints]], row_nbytes: int) -> _Ints:
    """One copy per piece that is contiguous on both sides: [pieces, 3]. Each axis holds offsets on either side; those
    along which the bytes follow one another on both become part of the piece, whatever their order."""
    nbytes, left = row_nbytes, []
    for here, there in axes:
        to, origin = to + here[0], origin + there[0]
        left.append((here - here[0], there - there[0]))
    while (found := next((axis for axis in left if _follows(axis, nbytes)), None)) is not None:
        left = [axis for axis in left if axis is not found]
        nbytes *= len(found[0])
    for here, there in left:
        to, origin = np.add.outer(to, here).ravel(), np.add.outer(origin, there).ravel()
    return np.stack([to, origin, np.full(len(to), nbytes, dtype=np.int64)], axis=1)


def _follows(axis: tuple[_Ints, _Ints], nbytes: int) -> bool:
    steps = np.arange(len(axis[0]), dtype=np.int64) * nbytes
    return all(np.array_equal(offsets, steps) for offsets in axis)


def _coalesce(local: _Ints, remote: _Ints, nbytes: _Ints) -> CopyArray:
    """Merges copies that follow one another on both sides; sorted by local address."""
    if not len(local):
        return np.empty((0, 3), dtype=np.uint64)
    order = np.argsort(local, kind="stable")
    local, remote, nbytes = local[order], remote[order], nbytes[order]
    follows = (local[1:] == local[:-1] + nbytes[:-1]) & (remote[1:] == remote[:-1] + nbytes[:-1])
    first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return np.stack([local[first], remote[first], np.add.reduceat(nbytes, first)], axis=1).astype(np.uint64)


# -- tables -----------------------------------------------------------------------------------------------


def _first_position(side: RankTables, group: int) -> int:
    return side.tables[group].first_block * side.rank.layouts[group].tokens_per_block


def _blocks_used(layout: KVLayout, table: BlockTable, tokens: TokenRange) -> slice:
    """Which entries of `table` hold `tokens`; a state group's live slot is its last."""
    if layout.kind.is_state:
        if not table.block_ids:
            raise TransferError("a state group's block table is empty")
        return slice(len(table.block_ids) - 1, len(table.block_ids))
    first = tokens.start // layout.tokens_per_block - table.first_block
    return slice(first, max(first, layout.blocks_for(tokens.stop) - table.first_block) if len(tokens) else first)


def _show(tokens: TokenRange) -> str:
    return f"[{tokens.start}, {tokens.stop})"
