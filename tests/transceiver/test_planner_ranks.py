"""Plans between workers of several ranks, executed over real memory, against a direct re-layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rank_memory import Pool, execute, overlaps, side

from kvferry.core import AxisOrder, DType, GroupKind, KVLayout, RankInfo, TokenRange
from kvferry.transceiver.base import CopyArray
from kvferry.transceiver.planner import (
    GroupSpan,
    RankTables,
    expected_nbytes,
    oldest_needed,
    plan_generation_reads,
    plan_transfer,
)
from kvferry.transceiver.shares import GroupShare, check_shapes, pair_sources

Truth = dict[tuple[int, bool], NDArray[np.uint8]]
"""What a layer caches, by (layer, is it state): [position, plane, head, row bytes]; a state has its own positions."""


@dataclass(frozen=True)
class Rank:
    tables: RankTables
    pools: list[Pool]

    @property
    def info(self) -> RankInfo:
        return self.tables.rank


def draw_model(draw: st.DrawFn) -> list[KVLayout]:
    """Layer groups over some five layers, interleaved: attention of one or two kinds, sometimes states."""
    head_dim, dtype = draw(st.integers(1, 3)), draw(st.sampled_from([DType.FLOAT32, DType.INT8]))
    kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.MLA]))
    planes, heads = (1, 1) if kind is GroupKind.MLA else (2, draw(st.integers(1, 6)))
    base = KVLayout(kind, tuple(range(draw(st.integers(4, 6)))), heads, head_dim, dtype, planes=planes)
    second = draw(st.sampled_from([None, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.SSM]))
    if second is None:
        return [base]
    other = replace(base, kind=second, layers=base.layers[1::2], dtype=DType.BFLOAT16)
    if not second.is_state:
        other = replace(other, window=draw(st.integers(1, 30)))
    return [replace(base, layers=base.layers[::2]), other]


def draw_stages(draw: st.DrawFn, layers: int) -> list[range]:
    cuts = sorted(draw(st.lists(st.integers(1, layers - 1), unique=True, max_size=3)))
    return [range(*ends) for ends in zip([0, *cuts], [*cuts, layers], strict=True)]


def draw_worker(draw: st.DrawFn, model: list[KVLayout], stop: int, name: str) -> list[Rank]:
    """Every rank of a worker, with a table that covers [0, stop) less what its windows have dropped."""
    tp_size = draw(st.integers(1, 4))
    stages = draw_stages(draw, sum(len(layout.layers) for layout in model))
    sizes = [draw(st.integers(8, 64)) for _ in model]
    orders = [draw(st.sampled_from(list(AxisOrder))) for _ in model]
    scattered = draw(st.booleans())
    ranks = []
    for pp_rank, layers in enumerate(stages):
        for tp_rank in range(tp_size):
            pools = []
            for layout, size, order in zip(model, sizes, orders, strict=True):
                part = layout.shard(tp_rank, tp_size, layers)
                if part is None:
                    continue
                part = part if part.kind.is_state else replace(part, tokens_per_block=size, axis_order=order)
                pools.append(make_pool(draw, part, stop, scattered))
            ranks.append(Rank(side(name, pools, tp=(tp_rank, tp_size), pp=(pp_rank, len(stages))), pools))
    return ranks


def make_pool(draw: st.DrawFn, layout: KVLayout, stop: int, scattered: bool) -> Pool:
    if layout.kind.is_state:
        return Pool(layout, [draw(st.integers(0, 2))], 3, 0)
    stale = oldest_needed(layout, stop) // layout.tokens_per_block
    first = draw(st.integers(0, min(stale, layout.blocks_for(stop))))
    needed = layout.blocks_for(stop) - first
    ids = draw(st.permutations(range(needed + 2)))[:needed] if scattered else list(range(1, needed + 1))
    return Pool(layout, ids, needed + 2, draw(st.integers(0, 1000)), first)


def fill(ranks: list[Rank], truth: Truth) -> None:
    for rank in ranks:
        for pool in rank.pools:
            rows = truth_of(pool.layout, truth)
            if pool.layout.kind.is_state:
                pool.view[pool.table.block_ids[-1]] = rows
            else:
                first = pool.table.first_block * pool.layout.tokens_per_block
                pool.write(first, rows[first:])


def truth_of(layout: KVLayout, truth: Truth) -> NDArray[np.uint8]:
    """[position, layer, plane, head, row bytes] of what `layout` holds."""
    return np.stack([truth[layer, layout.kind.is_state] for layer in layout.layers], axis=1)[
        :, :, :, list(layout.heads)
    ]


def relaid(pool: Pool, truth: Truth, spans: list[GroupSpan]) -> NDArray[np.uint8]:
    """What the pool's bytes must be once `spans` of its group have arrived."""
    twin = Pool(pool.layout, pool.table.block_ids, len(pool.generations), 0, pool.table.first_block)
    twin.bytes[:] = pool.bytes
    layout, rows = pool.layout, truth_of(pool.layout, truth)
    for span in spans:
        held = TokenRange(0, layout.tokens_per_block) if layout.kind.is_state else span.tokens
        for layer in span.share.layers:
            for head in span.share.heads:
                place = layout.layers.index(layer), slice(None), head - layout.first_head
                for position in range(held.start, held.stop):
                    twin.view[pool.block_at(position), position % layout.tokens_per_block][place] = rows[position][
                        place
                    ]
    return twin.bytes


def parts_of(layout: KVLayout) -> int:
    return len(layout.layers) * layout.kv_heads


def merged(copies: CopyArray) -> bool:
    """Whether no copy could be joined with the one that follows it at the destination."""
    ordered = copies[np.argsort(copies[:, 0])].astype(np.int64)
    ends = ordered[:-1, :2] + ordered[:-1, 2:]
    return not bool(np.any(np.all(ends == ordered[1:, :2], axis=1)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Rank], list[Rank], Truth, TokenRange]:
    model = draw_model(draw)
    stop = draw(st.integers(1, 90))
    tokens = TokenRange(draw(st.integers(0, stop)), stop)
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    truth = {}
    for layout in model:
        positions = layout.tokens_per_block if layout.kind.is_state else stop
        shape = (positions, layout.planes, layout.kv_heads, layout.row_nbytes)
        for layer in layout.layers:
            truth[layer, layout.kind.is_state] = generator.integers(0, 256, shape, dtype=np.uint8)
    source = draw_worker(draw, model, stop, "prefill-0")
    fill(source, truth)
    return source, draw_worker(draw, model, stop, "decode-0"), truth, tokens


@settings(max_examples=200, deadline=None)
@given(cases())
def test_plans_between_all_ranks_equal_a_direct_relayout(
    case: tuple[list[Rank], list[Rank], Truth, TokenRange],
) -> None:
    source, destination, truth, tokens = case
    for rank in destination:
        for giver in source:
            check_shapes(rank.info, giver.info)
        paired = pair_sources(rank.info, [giver.info for giver in source])
        givers = [giver for giver in source if giver.info in paired]
        plans = [plan_transfer(giver.tables, rank.tables, tokens) for giver in givers]
        spans: dict[int, list[GroupSpan]] = {index: [] for index in range(len(rank.pools))}
        for plan in plans:
            for span in plan.spans:
                spans[span.share.destination_group].append(span)
        expected = [relaid(pool, truth, spans[index]) for index, pool in enumerate(rank.pools)]
        copies = np.concatenate([plan.copies for plan in plans])
        assert not overlaps(copies[:, 0], copies[:, 2])
        for giver, plan in zip(givers, plans, strict=True):
            least, most = expected_nbytes(giver.tables, rank.info, tokens)
            assert least <= plan.nbytes == int(plan.copies[:, 2].sum()) <= most
            assert merged(plan.copies)
            execute(plan.copies)
        for pool, wanted in zip(rank.pools, expected, strict=True):
            assert np.array_equal(pool.bytes, wanted)
        for index, pool in enumerate(rank.pools):
            # All that the next token looks back to has arrived.
            needed = range(max(tokens.start, oldest_needed(pool.layout, tokens.stop)), tokens.stop)
            if needed and not pool.layout.kind.is_state:
                shares = [span.share for span in spans[index]]
                assert sum(len(share.layers) * len(share.heads) for share in shares) == parts_of(pool.layout)
                assert all(
                    span.tokens.start <= needed.start and span.tokens.stop == needed.stop for span in spans[index]
                )
        for giver in source:
            if giver not in givers:
                assert plan_transfer(giver.tables, rank.tables, tokens).nbytes == 0


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_parts_of_a_range_add_up_to_what_the_end_needs(
    case: tuple[list[Rank], list[Rank], Truth, TokenRange], data: st.DataObject
) -> None:
    source, destination, truth, tokens = case
    cuts = sorted(data.draw(st.sets(st.integers(tokens.start, tokens.stop), max_size=4)))
    parts = [TokenRange(*ends) for ends in zip([tokens.start, *cuts], [*cuts, tokens.stop], strict=True)]
    for rank in destination:
        # The truth about a pool does not depend on who gives which part: one share of all of it stands for them.
        expected = []
        for pool in rank.pools:
            whole = GroupShare(0, 0, pool.layout.layers, tuple(pool.layout.heads))
            start = max(tokens.start, oldest_needed(pool.layout, tokens.stop))
            moves = len(tokens) if pool.layout.kind.is_state else start < tokens.stop
            expected.append(
                relaid(pool, truth, [GroupSpan(whole, TokenRange(min(start, tokens.stop), tokens.stop))] * bool(moves))
            )
        for giver in source:
            for part in parts:
                plan = plan_transfer(giver.tables, rank.tables, part, horizon=tokens.stop)
                reads = plan_generation_reads(giver.tables, plan)
                assert len(np.unique(reads.addresses)) == len(reads.addresses)
                assert np.array_equal(plan.writes[:, [1, 0, 2]], plan.copies)
                execute(plan.copies)
        for pool, wanted in zip(rank.pools, expected, strict=True):
            assert np.array_equal(pool.bytes, wanted)
