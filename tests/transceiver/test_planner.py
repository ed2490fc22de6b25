"""Plans executed over real memory, against a direct re-layout with numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_memory import Pool, execute, overlaps, side

from kvferry.core import AxisOrder, BlockTable, DType, GroupKind, KVLayout, TokenRange, TransferError
from kvferry.transceiver.planner import (
    arrives_in_part,
    expected_nbytes,
    group_spans,
    oldest_needed,
    plan_generation_reads,
    plan_transfer,
)

BASE = KVLayout(GroupKind.FULL, layers=(0, 1, 2), kv_heads=2, head_dim=2, dtype=DType.BFLOAT16, tokens_per_block=4)


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
    destination, source, tokens = case
    before = destination.bytes.copy()
    expected = destination.sequence().copy()
    expected[tokens.start : tokens.stop] = source.sequence()[tokens.start : tokens.stop]

    plan = plan_transfer(side("source", [source]), side("destination", [destination]), tokens)
    assert plan.nbytes == len(tokens) * destination.layout.token_nbytes == int(plan.copies[:, 2].sum())
    assert not overlaps(plan.copies[:, 0], plan.copies[:, 2])
    execute(plan.copies)
    assert np.array_equal(destination.sequence(), expected)

    touched = np.zeros(len(before), dtype=bool)
    for addr, _, nbytes in plan.copies.tolist():
        offset = addr - destination.region.addr
        touched[offset : offset + nbytes] = True
    assert int(touched.sum()) == plan.nbytes
    assert np.array_equal(destination.bytes[~touched], before[~touched])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_generation_reads_name_exactly_the_blocks_read(case: tuple[Pool, Pool, TokenRange]) -> None:
    destination, source, tokens = case
    origin = side("source", [source])
    plan = plan_transfer(origin, side("destination", [destination]), tokens)
    reads = plan_generation_reads(origin, plan)
    size = source.layout.tokens_per_block
    blocks = sorted({source.table.block_ids[position // size] for position in range(tokens.start, tokens.stop)})
    assert sorted(reads.expected.tolist()) == [1000 + block for block in blocks]
    found = np.zeros(len(reads.expected), dtype=np.uint64)
    execute(reads.copies(found.ctypes.data))
    assert np.array_equal(found, reads.expected)


def test_whole_blocks_are_one_copy_each_and_runs_are_merged() -> None:
    destination, source = Pool(BASE, [4, 5, 6, 0], 8, 0), Pool(BASE, [1, 2, 3, 7], 8, 1)
    plan = plan_transfer(side("source", [source]), side("destination", [destination]), TokenRange(0, 16))
    assert plan.copies[:, 2].tolist() == [BASE.slot_nbytes, 3 * BASE.slot_nbytes]


def test_runs_are_merged_whatever_the_order_of_the_tokens() -> None:
    destination, source = Pool(BASE, [6, 5, 4], 8, 0), Pool(BASE, [3, 2, 1], 8, 1)
    plan = plan_transfer(side("source", [source]), side("destination", [destination]), TokenRange(0, 12))
    assert plan.copies[:, 2].tolist() == [3 * BASE.slot_nbytes]


def test_a_partial_block_is_one_copy_per_layer_plane_and_head() -> None:
    destination, source = Pool(BASE, [0], 1, 0), Pool(BASE, [0], 1, 1)
    plan = plan_transfer(side("source", [source]), side("destination", [destination]), TokenRange(1, 3))
    assert plan.copies[:, 2].tolist() == [2 * BASE.row_nbytes] * (3 * 2 * 2)


def test_token_major_order_keeps_the_heads_of_a_token_together() -> None:
    layout = replace(BASE, axis_order=AxisOrder.TOKEN_HEAD)
    destination, source = Pool(layout, [0], 1, 0), Pool(layout, [0], 1, 1)
    plan = plan_transfer(side("source", [source]), side("destination", [destination]), TokenRange(1, 3))
    assert plan.copies[:, 2].tolist() == [2 * 2 * BASE.row_nbytes] * (3 * 2)


def test_an_empty_range_has_an_empty_plan() -> None:
    destination, source = Pool(BASE, [0], 1, 0), Pool(BASE, [0], 1, 1)
    origin = side("source", [source])
    plan = plan_transfer(origin, side("destination", [destination]), TokenRange(3, 3))
    assert (plan.nbytes, plan.copies.shape) == (0, (0, 3))
    assert len(plan_generation_reads(origin, plan).expected) == 0


class TestGroups:
    WINDOW = replace(BASE, kind=GroupKind.WINDOW, layers=(3,), window=6)
    STATE = replace(BASE, kind=GroupKind.SSM, layers=(4,))

    def test_two_groups_in_different_order_and_dtype(self) -> None:
        window = replace(self.WINDOW, dtype=DType.FLOAT32)
        destination = [Pool(BASE, [0, 1], 3, 0), Pool(window, [2, 1], 3, 1)]
        source = [Pool(window, [0, 2], 3, 2), Pool(BASE, [2, 0], 3, 3)]
        plan = plan_transfer(side("source", source), side("destination", destination), TokenRange(0, 7))
        execute(plan.copies)
        assert np.array_equal(destination[0].sequence()[:7], source[1].sequence()[:7])
        assert np.array_equal(destination[1].sequence()[:7], source[0].sequence()[:7])

    def test_a_window_moves_what_both_still_hold(self) -> None:
        destination = [Pool(self.WINDOW, [0, 1, 2, 3], 4, 0)]
        source = [Pool(self.WINDOW, [2, 3], 4, 1, first_block=2)]
        spans = group_spans(side("source", source), side("destination", destination), TokenRange(0, 16))
        assert [span.tokens for span in spans] == [TokenRange(8, 16)]
        plan = plan_transfer(side("source", source), side("destination", destination), TokenRange(0, 16))
        execute(plan.copies)
        assert np.array_equal(destination[0].sequence()[8:16], source[0].sequence())

    def test_a_window_that_lacks_more_than_the_rest_begins_with_its_table(self) -> None:
        """The destination holds the first 12 positions of full attention, and nothing of the window."""
        full, window = Pool(BASE, [0, 1, 2, 3], 4, 0), Pool(self.WINDOW, [3, 1], 4, 1, first_block=2)
        source = [Pool(BASE, [3, 2, 1, 0], 4, 2), Pool(self.WINDOW, [0, 2], 4, 3, first_block=2)]
        before = full.sequence()[:12].copy()
        sides, tokens = (side("source", source), side("destination", [full, window])), TokenRange(12, 15)
        assert [span.tokens for span in group_spans(*sides, tokens)] == [tokens, TokenRange(8, 15)]
        plan = plan_transfer(*sides, tokens)
        assert plan.nbytes == 3 * BASE.token_nbytes + 7 * self.WINDOW.token_nbytes
        execute(plan.copies)
        assert np.array_equal(full.sequence()[:12], before)
        assert np.array_equal(full.sequence()[12:15], source[0].sequence()[12:15])
        assert np.array_equal(window.sequence()[:7], source[1].sequence()[:7])
        assert expected_nbytes(sides[0], sides[1].rank, tokens) == (
            3 * (BASE.token_nbytes + self.WINDOW.token_nbytes),
            plan.nbytes,
        )
        assert not arrives_in_part(plan, sides[1].rank, tokens)

    def test_positions_a_window_still_needs_must_be_held(self) -> None:
        destination = [Pool(self.WINDOW, [0, 1, 2, 3], 4, 0)]
        source = [Pool(self.WINDOW, [3], 4, 1, first_block=3)]
        with pytest.raises(TransferError, match=r"positions \[11, 12\) are needed"):
            plan_transfer(side("source", source), side("destination", destination), TokenRange(0, 16))

    def test_full_attention_needs_every_position(self) -> None:
        destination, source = Pool(BASE, [0, 1], 4, 0), Pool(BASE, [1], 4, 1, first_block=1)
        with pytest.raises(TransferError, match=r"positions \[0, 4\) are needed"):
            plan_transfer(side("source", [source]), side("destination", [destination]), TokenRange(0, 8))

    def test_a_part_of_a_longer_transfer_leaves_out_what_its_end_does_not_look_back_to(self) -> None:
        destination = [Pool(self.WINDOW, [0, 1, 2, 3], 4, 0)]
        source = [Pool(self.WINDOW, [1, 2], 4, 1, first_block=1)]
        for tokens, moved in (
            (TokenRange(4, 8), []),
            (TokenRange(8, 12), [TokenRange(11, 12)]),
        ):
            spans = group_spans(side("source", source), side("destination", destination), tokens, horizon=16)
            assert [span.tokens for span in spans] == moved
        with pytest.raises(TransferError, match=r"positions \[3, 4\) are needed but no longer held"):
            group_spans(side("source", source), side("destination", destination), TokenRange(2, 8), horizon=8)

    def test_a_source_knows_the_least_and_the_most_a_reader_may_take(self) -> None:
        source = side("source", [Pool(BASE, [0, 1, 2, 3], 4, 0), Pool(self.WINDOW, [2, 3], 4, 1, first_block=2)])
        full, window = BASE.token_nbytes, self.WINDOW.token_nbytes
        reader = side("reader", [Pool(BASE, [], 1, 0), Pool(self.WINDOW, [], 1, 0)]).rank
        assert expected_nbytes(source, reader, TokenRange(0, 16)) == (16 * full + 5 * window, 16 * full + 8 * window)
        assert expected_nbytes(source, reader, TokenRange(4, 4)) == (0, 0)
        stage = side("reader", [Pool(self.WINDOW, [], 1, 0)], pp=(1, 2)).rank
        assert expected_nbytes(source, stage, TokenRange(0, 16)) == (5 * window, 8 * window)

    def test_what_the_next_token_looks_back_to(self) -> None:
        assert oldest_needed(BASE, 100) == 0
        assert oldest_needed(self.WINDOW, 100) == 95
        assert oldest_needed(self.WINDOW, 3) == 0
        assert oldest_needed(replace(self.WINDOW, kind=GroupKind.CHUNKED), 100) == 96

    def test_state_moves_its_live_slot_whole(self) -> None:
        destination, source = Pool(self.STATE, [2], 4, 0), Pool(self.STATE, [3, 1], 4, 1)
        origin = side("source", [source])
        plan = plan_transfer(origin, side("destination", [destination]), TokenRange(0, 50))
        assert plan.nbytes == self.STATE.slot_nbytes
        execute(plan.copies)
        slot = self.STATE.slot_nbytes
        assert np.array_equal(destination.bytes[2 * slot : 3 * slot], source.bytes[slot : 2 * slot])
        assert plan_generation_reads(origin, plan).expected.tolist() == [1001]

    def test_two_states_of_the_same_layers_are_told_apart(self) -> None:
        conv = replace(self.STATE, kind=GroupKind.CONV, kv_heads=1, head_dim=3)
        destination = [Pool(conv, [2], 4, 0), Pool(self.STATE, [1], 4, 1)]
        source = [Pool(self.STATE, [3], 4, 2), Pool(conv, [0], 4, 3)]
        sides = side("source", source), side("destination", destination)
        plan = plan_transfer(*sides, TokenRange(7, 50))
        assert plan.nbytes == conv.slot_nbytes + self.STATE.slot_nbytes
        execute(plan.copies)
        for ours, theirs in ((destination[0], source[1]), (destination[1], source[0])):
            slot, here, there = ours.layout.slot_nbytes, ours.table.block_ids[0], theirs.table.block_ids[0]
            assert np.array_equal(ours.bytes[here * slot :][:slot], theirs.bytes[there * slot :][:slot])
        assert plan_transfer(*sides, TokenRange(50, 50)).nbytes == 0


class TestRefusals:
    def test_a_table_that_is_too_short(self) -> None:
        destination, source = Pool(BASE, [0], 4, 0), Pool(BASE, [0, 1], 4, 1)
        with pytest.raises(
            TransferError, match=r"destination block table holds positions \[0, 4\), position 4 is wanted"
        ):
            plan_transfer(side("source", [source]), side("destination", [destination]), TokenRange(0, 5))

    @pytest.mark.parametrize("block", [-1, 4])
    def test_a_block_outside_its_pool(self, block: int) -> None:
        destination, source = Pool(BASE, [0], 4, 0), Pool(BASE, [0], 4, 1)
        source.table = BlockTable((block,), (1000,))
        with pytest.raises(TransferError, match="a source block id is outside its pool of 4 blocks"):
            plan_transfer(side("source", [source]), side("destination", [destination]), TokenRange(0, 4))

    def test_one_table_per_group(self) -> None:
        destination, source = side("destination", [Pool(BASE, [0], 4, 0)]), side("source", [Pool(BASE, [0], 4, 1)])
        with pytest.raises(TransferError, match="0 source block tables for 1 layer groups"):
            plan_transfer(replace(source, tables=()), destination, TokenRange(0, 4))

    def test_generations_missing_from_the_handle(self) -> None:
        destination, source = Pool(BASE, [0], 4, 0), Pool(BASE, [0], 4, 1)
        source.table = BlockTable((0,), ())
        origin = side("source", [source])
        plan = plan_transfer(origin, side("destination", [destination]), TokenRange(0, 4))
        with pytest.raises(TransferError, match="lacks generations"):
            plan_generation_reads(origin, plan)
