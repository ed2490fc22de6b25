"""Which rank takes what from whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_memory import Pool, side

from kvferry.core import DType, GroupKind, KVLayout, RankInfo, TransferError
from kvferry.transceiver.shares import check_shapes, group_shares, pair_sources

BASE = KVLayout(GroupKind.FULL, layers=(0, 1, 2, 3), kv_heads=2, head_dim=2, tokens_per_block=4)
WINDOW = replace(BASE, kind=GroupKind.WINDOW, layers=(4, 5), window=6)


def rank_of(layouts: list[KVLayout], tp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1)) -> RankInfo:
    return side("worker", [Pool(layout, [], 1, 0) for layout in layouts], tp=tp, pp=pp).rank


def worker_of(layouts: list[KVLayout], tp_size: int, stages: list[range] | None = None) -> list[RankInfo]:
    """The ranks of a worker, stage by stage."""
    ranks = []
    for pp_rank, layers in enumerate(stages or [range(64)]):
        for tp_rank in range(tp_size):
            held = [layout.shard(tp_rank, tp_size, layers) for layout in layouts]
            part = [layout for layout in held if layout is not None]
            ranks.append(rank_of(part, (tp_rank, tp_size), (pp_rank, len(stages or [0]))))
    return ranks


def givers(source: list[RankInfo], destination: RankInfo) -> list[tuple[int, int, list[tuple[int, ...]]]]:
    """(tp rank, pp rank, heads of each share) of those paired with `destination`."""
    return [
        (rank.tp_rank, rank.pp_rank, [share.heads for share in group_shares(rank, destination)])
        for rank in pair_sources(destination, source)
    ]


def test_equal_ranks_pair_one_to_one() -> None:
    source, destination = worker_of([BASE], 2), worker_of([BASE], 2)
    assert [givers(source, rank) for rank in destination] == [[(0, 0, [(0,)])], [(1, 0, [(1,)])]]


def test_a_whole_rank_takes_from_every_shard() -> None:
    assert givers(worker_of([BASE], 2), rank_of([BASE])) == [(0, 0, [(0,)]), (1, 0, [(1,)])]


def test_a_shard_takes_its_heads_from_a_whole_rank() -> None:
    four = replace(BASE, kv_heads=4)
    assert [givers([rank_of([four])], rank) for rank in worker_of([four], 2)] == [
        [(0, 0, [(0, 1)])],
        [(0, 0, [(2, 3)])],
    ]


def test_replicas_of_a_head_are_taken_in_turn() -> None:
    latent = replace(BASE, kind=GroupKind.MLA, kv_heads=1, planes=1)
    source, destination = worker_of([latent], 2), worker_of([latent], 4)
    assert [givers(source, rank)[0][0] for rank in destination] == [0, 1, 0, 1]
    assert givers(worker_of([latent], 4), rank_of([latent])) == [(0, 0, [(0,)])]


def test_a_replica_nobody_needs_has_nothing_to_give() -> None:
    source = worker_of([BASE], 4)
    assert givers(source, rank_of([BASE])) == [(0, 0, [(0,)]), (2, 0, [(1,)])]
    assert group_shares(source[1], rank_of([BASE])) == ()


def test_three_heads_on_two_ranks_share_the_one_in_the_middle() -> None:
    three = replace(BASE, kv_heads=3)
    source = worker_of([three], 2)
    assert [tuple(rank.layouts[0].heads) for rank in source] == [(0, 1), (1, 2)]
    assert givers(source, rank_of([three])) == [(0, 0, [(0, 1)]), (1, 0, [(2,)])]
    assert givers(source, source[1]) == [(1, 0, [(1, 2)])]


def test_stages_give_the_layers_they_hold() -> None:
    source = worker_of([BASE, WINDOW], 1, [range(3), range(3, 6)])
    shares = [group_shares(rank, rank_of([WINDOW, BASE])) for rank in source]
    assert [[(s.source_group, s.destination_group, s.layers) for s in part] for part in shares] == [
        [(0, 1, (0, 1, 2))],
        [(1, 0, (4, 5)), (0, 1, (3,))],
    ]


def test_conv_and_ssm_states_of_one_layer_are_told_apart() -> None:
    conv, ssm = replace(BASE, kind=GroupKind.CONV), replace(BASE, kind=GroupKind.SSM, head_dim=8)
    shares = group_shares(rank_of([conv, ssm]), rank_of([ssm, conv]))
    assert [(share.source_group, share.destination_group) for share in shares] == [(1, 0), (0, 1)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"kv_heads": 1}, "model_heads"),
            ({"head_dim": 8}, "head_dim"),
            ({"dtype": DType.FLOAT32, "head_dim": 2}, "dtype"),
            ({"planes": 1}, "planes"),
            ({"window": 3}, "window"),
            ({"kind": GroupKind.MLA}, "kind"),
        ],
    )
    def test_groups_that_differ(self, change: dict[str, object], name: str) -> None:
        half = replace(BASE, dtype=DType.BFLOAT16)
        other = rank_of([replace(half, **change)])  # type: ignore[arg-type]
        for check in (check_shapes, group_shares):
            with pytest.raises(TransferError, match=f"{name} of layer group 0"):
                check(rank_of([half]), other)

    def test_layers_that_a_worker_of_one_stage_lacks(self) -> None:
        with pytest.raises(TransferError, match=r"layers 2\.\.3 are missing there"):
            check_shapes(rank_of([BASE]), rank_of([replace(BASE, layers=(0, 1))]))
        with pytest.raises(TransferError, match=r"layers 4\.\.5 are missing here"):
            check_shapes(rank_of([BASE]), rank_of([BASE, WINDOW]))
        check_shapes(rank_of([BASE]), rank_of([replace(BASE, layers=(0, 1))], pp=(0, 2)))

    def test_state_needs_the_same_block_size(self) -> None:
        state = replace(BASE, kind=GroupKind.CONV)
        with pytest.raises(TransferError, match="tokens_per_block of layer group 0: 4 here, 8 there"):
            check_shapes(rank_of([state]), rank_of([replace(state, tokens_per_block=8)]))

    def test_heads_that_are_not_those_of_the_rank(self) -> None:
        with pytest.raises(TransferError, match=r"kv heads 0\.\.1 of 2, which are not those of tensor-parallel rank 1"):
            check_shapes(rank_of([BASE]), rank_of([BASE], tp=(1, 2)))

    def test_ranks_that_do_not_make_up_a_worker(self) -> None:
        source = worker_of([BASE], 2)
        with pytest.raises(TransferError, match="no rank of the source has head 1 of the keys and values of layer 0"):
            pair_sources(rank_of([BASE]), source[:1])
        with pytest.raises(TransferError, match="worker has layers twice"):
            pair_sources(rank_of([BASE]), [*source, source[0]])
