"""Plans executed over real memory, against a direct re-layout with numpy."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.core import (
    AxisOrder,
    BlockTable,
    DType,
    GroupKind,
    KVLayout,
    MemRegion,
    RankInfo,
    Resolution,
    Role,
    Source,
    TokenRange,
    TransferError,
)
from kvferry.transceiver.base import CopyArray
from kvferry.transceiver.planner import (
    RankTables,
    group_spans,
    match_groups,
    oldest_needed,
    plan_generation_reads,
    plan_transfer,
)

RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "test")
BASE = KVLayout(GroupKind.FULL, layers=(0, 1, 2), kv_heads=2, head_dim=2, dtype=DType.BFLOAT16, tokens_per_block=4)


class Pool:
    """One group's memory: bytes, generations, and one request's table."""

    def __init__(self, layout: KVLayout, ids: list[int], blocks: int, seed: int, first_block: int = 0) -> None:
        self.layout = layout
        self.bytes = np.random.default_rng(seed).integers(0, 256, blocks * layout.slot_nbytes, dtype=np.uint8)
        self.generations = np.arange(1000, 1000 + blocks, dtype=np.uint64)
        self.table = BlockTable(tuple(ids), tuple(int(self.generations[block]) for block in ids), first_block)

    @property
    def region(self) -> MemRegion:
        return MemRegion(self.bytes.ctypes.data, self.bytes.nbytes)

    @property
    def generation_region(self) -> MemRegion:
        return MemRegion(self.generations.ctypes.data, self.generations.nbytes)

    def sequence(self) -> NDArray[np.uint8]:
        """The table's bytes by position: [position, layer, plane, head, row bytes]."""
        layout = self.layout
        inner = (
            (layout.kv_heads, layout.tokens_per_block)
            if layout.axis_order is AxisOrder.HEAD_TOKEN
            else (layout.tokens_per_block, layout.kv_heads)
        )
        shape = (-1, len(layout.layers), layout.planes, *inner, layout.row_nbytes)
        blocks = self.bytes.reshape(shape)[list(self.table.block_ids)]
        axes = (0, 4, 1, 2, 3, 5) if layout.axis_order is AxisOrder.HEAD_TOKEN else (0, 3, 1, 2, 4, 5)
        ordered = blocks.transpose(axes)
        return ordered.reshape(-1, *ordered.shape[2:])


def side(name: str, pools: list[Pool]) -> RankTables:
    rank = RankInfo(
        worker=name,
        role=Role.PREFILL,
        incarnation=name,
        endpoint="here:1",
        model_fingerprint="model",
        resolution=RESOLUTION,
        layouts=tuple(pool.layout for pool in pools),
        pools=tuple(pool.region for pool in pools),
        generations=tuple(pool.generation_region for pool in pools),
        agent_metadata=b"",
        handle_key=b"k",
    )
    return RankTables(rank, tuple(pool.table for pool in pools))


def execute(copies: CopyArray) -> None:
    for local, remote, nbytes in copies.tolist():
        ctypes.memmove(local, remote, nbytes)


def overlaps(starts: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> bool:
    order = np.argsort(starts)
    return bool(np.any(starts[order][1:] < (starts + nbytes)[order][:-1]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Pool, Pool, TokenRange]:
    layout = KVLayout(
        GroupKind.FULL,
        layers=tuple(range(draw(st.integers(1, 3)))),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.INT8])),
        planes=draw(st.integers(1, 2)),
    )
    stop = draw(st.integers(1, 90))
    start = draw(st.integers(0, stop))
    pools = []
    for seed in range(2):
        size = draw(st.integers(1, 64))
        order = draw(st.sampled_from(list(AxisOrder)))
        own = replace(layout, tokens_per_block=size, axis_order=order)
        needed = own.blocks_for(stop)
        if draw(st.booleans()):
            ids = list(range(draw(st.integers(0, 3)), needed + 3))[:needed]
        else:
            ids = draw(st.permutations(range(needed + 2)))[:needed]
        pools.append(Pool(own, list(ids), needed + 3, seed))
    return pools[0], pools[1], TokenRange(start, stop)


@settings(max_examples=250, deadline=None)
@given(cases())
def test_executing_a_plan_equals_a_direct_relayout(case: tuple[Pool, Pool, TokenRange]) -> None:
    local, remote, tokens = case
    before = local.bytes.copy()
    expected = local.sequence().copy()
    expected[tokens.start : tokens.stop] = remote.sequence()[tokens.start : tokens.stop]

    plan = plan_transfer(side("local", [local]), side("remote", [remote]), tokens)
    assert plan.nbytes == len(tokens) * local.layout.token_nbytes == int(plan.copies[:, 2].sum())
    assert not overlaps(plan.copies[:, 0], plan.copies[:, 2])
    execute(plan.copies)
    assert np.array_equal(local.sequence(), expected)

    touched = np.zeros(len(before), dtype=bool)
    for addr, _, nbytes in plan.copies.tolist():
        offset = addr - local.region.addr
        touched[offset : offset + nbytes] = True
    assert int(touched.sum()) == plan.nbytes
    assert np.array_equal(local.bytes[~touched], before[~touched])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_generation_reads_name_exactly_the_blocks_read(case: tuple[Pool, Pool, TokenRange]) -> None:
    local, remote, tokens = case
    source = side("remote", [remote])
    plan = plan_transfer(side("local", [local]), source, tokens)
    reads = plan_generation_reads(source, plan)
    size = remote.layout.tokens_per_block
    blocks = sorted({remote.table.block_ids[position // size] for position in range(tokens.start, tokens.stop)})
    assert sorted(reads.expected.tolist()) == [1000 + block for block in blocks]
    found = np.zeros(len(reads.expected), dtype=np.uint64)
    execute(reads.copies(found.ctypes.data))
    assert np.array_equal(found, reads.expected)


def test_whole_blocks_are_one_copy_each_and_runs_are_merged() -> None:
    local, remote = Pool(BASE, [4, 5, 6, 0], 8, 0), Pool(BASE, [1, 2, 3, 7], 8, 1)
    plan = plan_transfer(side("local", [local]), side("remote", [remote]), TokenRange(0, 16))
    assert plan.copies[:, 2].tolist() == [BASE.slot_nbytes, 3 * BASE.slot_nbytes]


def test_runs_are_merged_whatever_the_order_of_the_tokens() -> None:
    local, remote = Pool(BASE, [6, 5, 4], 8, 0), Pool(BASE, [3, 2, 1], 8, 1)
    plan = plan_transfer(side("local", [local]), side("remote", [remote]), TokenRange(0, 12))
    assert plan.copies[:, 2].tolist() == [3 * BASE.slot_nbytes]


def test_a_partial_block_is_one_copy_per_layer_plane_and_head() -> None:
    local, remote = Pool(BASE, [0], 1, 0), Pool(BASE, [0], 1, 1)
    plan = plan_transfer(side("local", [local]), side("remote", [remote]), TokenRange(1, 3))
    assert plan.copies[:, 2].tolist() == [2 * BASE.row_nbytes] * (3 * 2 * 2)


def test_token_major_order_keeps_the_heads_of_a_token_together() -> None:
    layout = replace(BASE, axis_order=AxisOrder.TOKEN_HEAD)
    local, remote = Pool(layout, [0], 1, 0), Pool(layout, [0], 1, 1)
    plan = plan_transfer(side("local", [local]), side("remote", [remote]), TokenRange(1, 3))
    assert plan.copies[:, 2].tolist() == [2 * 2 * BASE.row_nbytes] * (3 * 2)


def test_an_empty_range_has_an_empty_plan() -> None:
    local, remote = Pool(BASE, [0], 1, 0), Pool(BASE, [0], 1, 1)
    source = side("remote", [remote])
    plan = plan_transfer(side("local", [local]), source, TokenRange(3, 3))
    assert (plan.nbytes, plan.copies.shape) == (0, (0, 3))
    assert len(plan_generation_reads(source, plan).expected) == 0


class TestGroups:
    WINDOW = replace(BASE, kind=GroupKind.WINDOW, layers=(3,), window=6)
    STATE = replace(BASE, kind=GroupKind.SSM, layers=(4,))

    def test_groups_are_matched_by_their_layers(self) -> None:
        assert match_groups([BASE, self.WINDOW], [self.WINDOW, BASE]) == ((0, 1), (1, 0))

    def test_two_groups_in_different_order_and_dtype(self) -> None:
        window = replace(self.WINDOW, dtype=DType.FLOAT32)
        local = [Pool(BASE, [0, 1], 3, 0), Pool(window, [2, 1], 3, 1)]
        remote = [Pool(window, [0, 2], 3, 2), Pool(BASE, [2, 0], 3, 3)]
        plan = plan_transfer(side("local", local), side("remote", remote), TokenRange(0, 7))
        execute(plan.copies)
        assert np.array_equal(local[0].sequence()[:7], remote[1].sequence()[:7])
        assert np.array_equal(local[1].sequence()[:7], remote[0].sequence()[:7])

    def test_a_window_moves_what_both_still_hold(self) -> None:
        local = [Pool(self.WINDOW, [0, 1, 2, 3], 4, 0)]
        remote = [Pool(self.WINDOW, [2, 3], 4, 1, first_block=2)]
        spans = group_spans(side("local", local), side("remote", remote), TokenRange(0, 16))
        assert [span.tokens for span in spans] == [TokenRange(8, 16)]
        plan = plan_transfer(side("local", local), side("remote", remote), TokenRange(0, 16))
        execute(plan.copies)
        assert np.array_equal(local[0].sequence()[8:16], remote[0].sequence())

    def test_positions_a_window_still_needs_must_be_held(self) -> None:
        local = [Pool(self.WINDOW, [0, 1, 2, 3], 4, 0)]
        remote = [Pool(self.WINDOW, [3], 4, 1, first_block=3)]
        with pytest.raises(TransferError, match=r"positions \[11, 12\) are needed"):
            plan_transfer(side("local", local), side("remote", remote), TokenRange(0, 16))

    def test_full_attention_needs_every_position(self) -> None:
        local, remote = Pool(BASE, [0, 1], 4, 0), Pool(BASE, [1], 4, 1, first_block=1)
        with pytest.raises(TransferError, match=r"positions \[0, 4\) are needed"):
            plan_transfer(side("local", [local]), side("remote", [remote]), TokenRange(0, 8))

    def test_what_the_next_token_looks_back_to(self) -> None:
        assert oldest_needed(BASE, 100) == 0
        assert oldest_needed(self.WINDOW, 100) == 95
        assert oldest_needed(self.WINDOW, 3) == 0
        assert oldest_needed(replace(self.WINDOW, kind=GroupKind.CHUNKED), 100) == 96

    def test_state_moves_its_live_slot_whole(self) -> None:
        local, remote = Pool(self.STATE, [2], 4, 0), Pool(self.STATE, [3, 1], 4, 1)
        source = side("remote", [remote])
        plan = plan_transfer(side("local", [local]), source, TokenRange(0, 50))
        assert plan.nbytes == self.STATE.slot_nbytes
        execute(plan.copies)
        slot = self.STATE.slot_nbytes
        assert np.array_equal(local.bytes[2 * slot : 3 * slot], remote.bytes[slot : 2 * slot])
        assert plan_generation_reads(source, plan).expected.tolist() == [1001]


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"kv_heads": 1}, "kv_heads"),
            ({"head_dim": 8}, "head_dim"),
            ({"dtype": DType.FLOAT32}, "dtype"),
            ({"planes": 1}, "planes"),
            ({"window": 3}, "window"),
            ({"kind": GroupKind.MLA}, "kind"),
        ],
    )
    def test_layouts_that_differ(self, change: dict[str, object], name: str) -> None:
        with pytest.raises(TransferError, match=f"{name} of layer group 0"):
            match_groups([BASE], [replace(BASE, **change)])  # type: ignore[arg-type]

    def test_other_layers_or_groups(self) -> None:
        with pytest.raises(TransferError, match=r"layers of group 0: 0\.\.2"):
            match_groups([BASE], [replace(BASE, layers=(0, 1))])
        with pytest.raises(TransferError, match="layer groups: 1 here, 2 there"):
            match_groups([BASE], [BASE, replace(BASE, layers=(3,))])

    def test_state_needs_the_same_block_size(self) -> None:
        state = replace(BASE, kind=GroupKind.CONV)
        with pytest.raises(TransferError, match="tokens_per_block of layer group 0: 4 here, 8 there"):
            match_groups([state], [replace(state, tokens_per_block=8)])

    def test_a_table_that_is_too_short(self) -> None:
        local, remote = Pool(BASE, [0], 4, 0), Pool(BASE, [0, 1], 4, 1)
        with pytest.raises(TransferError, match=r"local block table holds positions \[0, 4\), position 4 is wanted"):
            plan_transfer(side("local", [local]), side("remote", [remote]), TokenRange(0, 5))

    @pytest.mark.parametrize("block", [-1, 4])
    def test_a_block_outside_its_pool(self, block: int) -> None:
        local, remote = Pool(BASE, [0], 4, 0), Pool(BASE, [0], 4, 1)
        remote.table = BlockTable((block,), (1000,))
        with pytest.raises(TransferError, match="a remote block id is outside its pool of 4 blocks"):
            plan_transfer(side("local", [local]), side("remote", [remote]), TokenRange(0, 4))

    def test_one_table_per_group(self) -> None:
        local, remote = side("local", [Pool(BASE, [0], 4, 0)]), side("remote", [Pool(BASE, [0], 4, 1)])
        with pytest.raises(TransferError, match="0 remote block tables for 1 layer groups"):
            plan_transfer(local, replace(remote, tables=()), TokenRange(0, 4))

    def test_generations_missing_from_the_handle(self) -> None:
        local, remote = Pool(BASE, [0], 4, 0), Pool(BASE, [0], 4, 1)
        remote.table = BlockTable((0,), ())
        source = side("remote", [remote])
        plan = plan_transfer(side("local", [local]), source, TokenRange(0, 4))
        with pytest.raises(TransferError, match="lacks generations"):
            plan_generation_reads(source, plan)
