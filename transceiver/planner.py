"""Which bytes of one rank's pools belong where in another's: a pure function of layouts, block tables and a range.

Planning is by token position, never by block count: the two sides may have different block sizes and axis orders.
`local` is the rank that will submit the copies; for a READ `remote` is the source, for a WRITE `local` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core import AxisOrder, BlockTable, GroupKind, KVLayout, MemRegion, RankInfo, TokenRange, TransferError
from kvferry.transceiver.base import CopyArray

_Ints = npt.NDArray[np.int64]
GENERATION_NBYTES = 8


@dataclass(frozen=True, slots=True)
class RankTables:
    """A rank and one request's blocks on it, one table per layout."""

    rank: RankInfo
    tables: tuple[BlockTable, ...]


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """The positions of one layer group that move, by the group's index on either side."""

    local_group: int
    remote_group: int
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
    """What moves between one local and one remote rank. Empty when the range is."""

    spans: tuple[GroupSpan, ...]
    copies: CopyArray
    nbytes: int


def plan_transfer(local: RankTables, remote: RankTables, tokens: TokenRange) -> TransferPlan:
    """Raises TransferError when the layouts do not match, a table does not cover the range, or a block id is
    outside its pool. The copies touch each byte once and are merged where contiguous on both sides."""
    spans = group_spans(local, remote, tokens)
    parts = [_group_copies(local, remote, span) for span in spans]
    copies = np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.uint64)
    nbytes = int(copies[:, 2].sum())
    for side, layouts in (("this worker", local.rank.layouts), (remote.rank.worker, remote.rank.layouts)):
        groups = [span.local_group if side == "this worker" else span.remote_group for span in spans]
        expected = sum(span_nbytes(layouts[group], span.tokens) for group, span in zip(groups, spans, strict=True))
        if expected != nbytes:
            raise TransferError(f"{side} expects {expected} bytes for positions {_show(tokens)}, the plan has {nbytes}")
    return TransferPlan(spans=spans, copies=copies, nbytes=nbytes)


def plan_generation_reads(source: RankTables, plan: TransferPlan) -> GenerationReads:
    """The generation word of every block of `source` (the remote rank of `plan`) that the plan reads."""
    addresses: list[_Ints] = []
    expected: list[npt.NDArray[np.uint64]] = []
    for span in plan.spans:
        layout, table = source.rank.layouts[span.remote_group], source.tables[span.remote_group]
        if len(table.generations) != len(table.block_ids):
            raise TransferError(f"layer group {span.remote_group}: the handle lacks generations")
        used = _blocks_used(layout, table, span.tokens)
        ids = np.asarray(table.block_ids[used], dtype=np.int64)
        addresses.append(source.rank.generations[span.remote_group].addr + GENERATION_NBYTES * ids)
        expected.append(np.asarray(table.generations[used], dtype=np.uint64))
    if not addresses:
        return GenerationReads(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64))
    return GenerationReads(np.concatenate(addresses).astype(np.uint64), np.concatenate(expected))


def match_groups(local: Sequence[KVLayout], remote: Sequence[KVLayout]) -> tuple[tuple[int, int], ...]:
    """(local, remote) indices of the groups that hold the same layers. Raises TransferError naming the first
    difference; block size and axis order may differ, except in state groups."""
    theirs = {layout.layers: index for index, layout in enumerate(remote)}
    if len(local) != len(remote):
        raise TransferError(f"layer groups: {len(local)} here, {len(remote)} there")
    pairs = []
    for index, layout in enumerate(local):
        other = theirs.get(layout.layers)
        if other is None:
            raise TransferError(f"layers of group {index}: {_ends(layout.layers)} are not one group there")
        _check_match(index, layout, remote[other])
        pairs.append((index, other))
    return tuple(pairs)


def group_spans(local: RankTables, remote: RankTables, tokens: TokenRange) -> tuple[GroupSpan, ...]:
    """What of `tokens` moves in each group: all of it, less what a sliding window has dropped on either side."""
    if not len(tokens):
        return ()
    for name, side in (("local", local), ("remote", remote)):
        if len(side.tables) != len(side.rank.layouts):
            raise TransferError(f"{len(side.tables)} {name} block tables for {len(side.rank.layouts)} layer groups")
    spans = []
    for ours, theirs in match_groups(local.rank.layouts, remote.rank.layouts):
        layout, other = local.rank.layouts[ours], remote.rank.layouts[theirs]
        if layout.kind.is_state:
            spans.append(GroupSpan(ours, theirs, tokens))
            continue
        start = max(
            tokens.start,
            local.tables[ours].first_block * layout.tokens_per_block,
            remote.tables[theirs].first_block * other.tokens_per_block,
        )
        needed = max(tokens.start, oldest_needed(layout, tokens.stop))
        if start > needed:
            raise TransferError(f"layer group {ours}: positions [{needed}, {start}) are needed but no longer held")
        spans.append(GroupSpan(ours, theirs, TokenRange(min(start, tokens.stop), tokens.stop)))
    return tuple(spans)


def oldest_needed(layout: KVLayout, next_position: int) -> int:
    """The first position that the token at `next_position` looks back to in this group."""
    if layout.window is None:
        return 0
    if layout.kind is GroupKind.CHUNKED:
        return next_position // layout.window * layout.window
    return max(0, next_position - layout.window + 1)


def span_nbytes(layout: KVLayout, tokens: TokenRange) -> int:
    """What one side expects to move for `tokens` of a group: the sum both compare."""
    return layout.slot_nbytes if layout.kind.is_state else len(tokens) * layout.token_nbytes


# -- one group --------------------------------------------------------------------------------------------


def _group_copies(local: RankTables, remote: RankTables, span: GroupSpan) -> CopyArray:
    ours, theirs = local.rank.layouts[span.local_group], remote.rank.layouts[span.remote_group]
    our_pool, their_pool = local.rank.pools[span.local_group], remote.rank.pools[span.remote_group]
    our_table, their_table = local.tables[span.local_group], remote.tables[span.remote_group]
    if ours.kind.is_state:
        our_ids = np.asarray(our_table.block_ids[_blocks_used(ours, our_table, span.tokens)], dtype=np.int64)
        their_ids = np.asarray(their_table.block_ids[_blocks_used(theirs, their_table, span.tokens)], dtype=np.int64)
        nbytes = np.full(1, ours.slot_nbytes, dtype=np.int64)
        return _coalesce(
            _slots(ours, our_pool, our_ids, "local"), _slots(theirs, their_pool, their_ids, "remote"), nbytes
        )
    starts, lengths = _segments(span.tokens, ours.tokens_per_block, theirs.tokens_per_block)
    here = _slots(ours, our_pool, _ids_at(ours, our_table, starts, "local"), "local")
    there = _slots(theirs, their_pool, _ids_at(theirs, their_table, starts, "remote"), "remote")
    whole = np.zeros(len(starts), dtype=bool)
    if ours.fingerprint() == theirs.fingerprint():
        whole = lengths == ours.tokens_per_block
    part = ~whole
    pieces = [
        np.stack([here[whole], there[whole], np.full(int(whole.sum()), ours.slot_nbytes, dtype=np.int64)], axis=1),
        _rows(ours, theirs, here[part], there[part], starts[part], lengths[part]),
    ]
    merged = np.concatenate(pieces)
    return _coalesce(merged[:, 0], merged[:, 1], merged[:, 2])


def _segments(tokens: TokenRange, block: int, other_block: int) -> tuple[_Ints, _Ints]:
    """Cuts a range at the block boundaries of both sides: (starts, lengths)."""
    cuts = [np.asarray([tokens.start, tokens.stop], dtype=np.int64)]
    cuts += [
        np.arange(-(-tokens.start // size) * size, tokens.stop, size, dtype=np.int64) for size in {block, other_block}
    ]
    bounds = np.sort(np.concatenate(cuts))
    lengths = np.diff(bounds)
    return bounds[:-1][lengths > 0], lengths[lengths > 0]


def _rows(ours: KVLayout, theirs: KVLayout, here: _Ints, there: _Ints, starts: _Ints, lengths: _Ints) -> _Ints:
    """Copies of parts of blocks, as long as both sides keep together: [pieces, 3]."""
    heads, row = ours.kv_heads, ours.row_nbytes
    if ours.axis_order is not theirs.axis_order:
        # Neither a head's tokens nor a token's heads lie together on both sides: row by row.
        step = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths] or [lengths])
        here, there, starts = (np.repeat(array, lengths) for array in (here, there, starts))
        starts, lengths = starts + step, np.ones(len(step), dtype=np.int64)
    elif ours.axis_order is AxisOrder.TOKEN_HEAD:
        heads, row = 1, row * ours.kv_heads
    inner = (len(ours.layers), ours.planes, heads)
    local = _offsets(ours, inner, starts) + here
    remote = _offsets(theirs, inner, starts) + there
    nbytes = np.broadcast_to(lengths * row, local.shape)
    return np.stack([local.ravel(), remote.ravel(), nbytes.ravel()], axis=1)


def _offsets(layout: KVLayout, inner: tuple[int, int, int], starts: _Ints) -> _Ints:
    """Byte offsets in a slot of each (layer, plane, head, start): [layers, planes, heads, starts]."""
    layer, plane, head = (np.arange(size, dtype=np.int64) for size in inner)
    if layout.axis_order is AxisOrder.HEAD_TOKEN:
        head_nbytes, token_nbytes = layout.tokens_per_block * layout.row_nbytes, layout.row_nbytes
    else:
        head_nbytes, token_nbytes = layout.row_nbytes, layout.kv_heads * layout.row_nbytes
    token = starts % layout.tokens_per_block
    offsets: _Ints = (
        layer[:, None, None, None] * layout.layer_nbytes
        + plane[:, None, None] * layout.plane_nbytes
        + head[:, None] * head_nbytes
        + token * token_nbytes
    )
    return offsets


def _coalesce(local: _Ints, remote: _Ints, nbytes: _Ints) -> CopyArray:
    """Merges copies that follow one another on both sides; sorted by local address."""
    if not len(local):
        return np.empty((0, 3), dtype=np.uint64)
    order = np.argsort(local, kind="stable")
    local, remote, nbytes = local[order], remote[order], nbytes[order]
    follows = (local[1:] == local[:-1] + nbytes[:-1]) & (remote[1:] == remote[:-1] + nbytes[:-1])
    first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return np.stack([local[first], remote[first], np.add.reduceat(nbytes, first)], axis=1).astype(np.uint64)


# -- tables and slots -------------------------------------------------------------------------------------


def _blocks_used(layout: KVLayout, table: BlockTable, tokens: TokenRange) -> slice:
    """Which entries of `table` hold `tokens`; a state group's live slot is its last."""
    if layout.kind.is_state:
        if not table.block_ids:
            raise TransferError("a state group's block table is empty")
        return slice(len(table.block_ids) - 1, len(table.block_ids))
    first = tokens.start // layout.tokens_per_block - table.first_block
    return slice(first, max(first, layout.blocks_for(tokens.stop) - table.first_block) if len(tokens) else first)


def _ids_at(layout: KVLayout, table: BlockTable, starts: _Ints, side: str) -> _Ints:
    """The block id that holds each position."""
    index = starts // layout.tokens_per_block - table.first_block
    ids = np.asarray(table.block_ids, dtype=np.int64)
    if len(index) and (index[0] < 0 or index[-1] >= len(ids)):
        stop = (table.first_block + len(ids)) * layout.tokens_per_block
        held = f"[{table.first_block * layout.tokens_per_block}, {stop})"
        raise TransferError(f"the {side} block table holds positions {held}, position {int(starts[-1])} is wanted")
    found: _Ints = ids[index]
    return found


def _slots(layout: KVLayout, pool: MemRegion, ids: _Ints, side: str) -> _Ints:
    """Addresses of slots; ids come from a peer, so they are checked against the pool."""
    count = pool.nbytes // layout.slot_nbytes
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise TransferError(f"a {side} block id is outside its pool of {count} blocks")
    addresses: _Ints = pool.addr + ids * layout.slot_nbytes
    return addresses


def _check_match(index: int, ours: KVLayout, theirs: KVLayout) -> None:
    names = ["kind", "kv_heads", "head_dim", "dtype", "window", "planes"]
    if ours.kind.is_state:
        names += ["tokens_per_block", "axis_order"]
    for name in names:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise TransferError(
                f"{name} of layer group {index}: {_value(mine)} here, {_value(other)} there", field=name
            )


def _value(value: object) -> object:
    return getattr(value, "value", value)


def _ends(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}..{layers[-1]}" if len(layers) > 1 else str(layers[0])


def _show(tokens: TokenRange) -> str:
    return f"[{tokens.start}, {tokens.stop})"
