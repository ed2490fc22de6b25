"""States of a step are read from the live slots of its sequences and written back there, and nowhere else."""

from __future__ import annotations

import torch

from kvferry.core import GroupKind, KVLayout
from kvferry.engine.spans import AttentionChunk
from kvferry.engine.states import PagedStates
from kvferry.kvcache.pool import build_pool

LAYOUTS = (
    KVLayout(GroupKind.CONV, (2, 5), 1, 6, tokens_per_block=1, planes=1),
    KVLayout(GroupKind.FULL, (0,), 2, 4, tokens_per_block=4),
    KVLayout(GroupKind.SSM, (2, 5), 3, 4, tokens_per_block=1, planes=1),
)
CHUNKS = [
    AttentionChunk(0, 1, ((4,), (0,), (1,)), (0, 0, 0)),
    AttentionChunk(3, 5, ((0,), (1, 2), (3,)), (0, 0, 0)),
    AttentionChunk(9, 1, ((2,), (3, 4, 5), (0,)), (0, 0, 0)),
]


def test_sequences_with_equally_many_tokens_run_together() -> None:
    states = PagedStates([build_pool(layout, 6, "cpu") for layout in LAYOUTS], CHUNKS)
    ones, five = states.runs
    assert (ones.sequences, ones.length, ones.rows.tolist()) == ((0, 2), 1, [0, 6])
    assert (five.sequences, five.length, five.rows.tolist()) == ((1,), 5, [1, 2, 3, 4, 5])


def test_each_kind_layer_and_sequence_has_a_place_of_its_own() -> None:
    pools = [build_pool(layout, 6, "cpu") for layout in LAYOUTS]
    states = PagedStates(pools, CHUNKS)
    shapes = {GroupKind.CONV: (1, 6), GroupKind.SSM: (3, 4)}
    value = 1.0
    expected = {}
    for layer in (2, 5):
        for kind, shape in shapes.items():
            for run in states.runs:
                assert states.read(layer, kind, run).shape == (len(run.sequences), *shape)
                written = torch.full((len(run.sequences), *shape), value)
                states.write(layer, kind, run, written.flatten(1))
                expected[layer, kind, run.sequences] = written
                value += 1
    for (layer, kind, sequences), written in expected.items():
        run = next(run for run in states.runs if run.sequences == sequences)
        assert torch.equal(states.read(layer, kind, run), written)
    assert pools[0].view[4, 1].unique().tolist() == pools[0].view[2, 1].unique().tolist() == [5.0]
    assert pools[2].view[3, 0].unique().tolist() == [4.0]
    assert [not pools[0].view[slot].any() for slot in range(6)] == [False, True, False, True, False, True]
    assert [not pools[2].view[slot].any() for slot in range(6)] == [False, False, True, False, True, True]
    assert not pools[1].view.any()


def test_what_is_read_is_a_copy() -> None:
    states = PagedStates([build_pool(layout, 6, "cpu") for layout in LAYOUTS], CHUNKS)
    (run, _) = states.runs
    states.read(2, GroupKind.SSM, run).fill_(7.0)
    assert not states.read(2, GroupKind.SSM, run).any()
