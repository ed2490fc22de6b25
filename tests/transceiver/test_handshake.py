from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.core import (
    AxisOrder,
    ErrorCode,
    GroupKind,
    KVLayout,
    MemRegion,
    RankInfo,
    Resolution,
    Role,
)
from kvferry.transceiver.handshake import IncompatiblePeerError, check_peer

LAYOUT = KVLayout(GroupKind.FULL, layers=(0, 1), kv_heads=2, head_dim=4, tokens_per_block=4)
WIDER = replace(LAYOUT, layers=(0, 1, 2))


@pytest.fixture
def rank(resolved: Resolution) -> RankInfo:
    return RankInfo(
        worker="prefill-0",
        role=Role.PREFILL,
        incarnation="life",
        endpoint="here:1",
        model_fingerprint="model",
        resolution=resolved,
        layouts=(LAYOUT,),
        pools=(MemRegion(4096, 3 * LAYOUT.slot_nbytes),),
        generations=(MemRegion(65536, 24),),
        agent_metadata=b"m",
        handle_key=b"k",
    )


def test_equal_ranks_pair(rank: RankInfo) -> None:
    check_peer(rank, replace(rank, worker="decode-0"))


def test_block_size_and_axis_order_may_differ(rank: RankInfo) -> None:
    layout = replace(LAYOUT, tokens_per_block=8, axis_order=AxisOrder.TOKEN_HEAD)
    other = replace(rank, layouts=(layout,), pools=(MemRegion(4096, 3 * layout.slot_nbytes),))
    check_peer(rank, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol_version": 99}, "protocol_version is 1 here and 99 there"),
        ({"model_fingerprint": "other"}, "model_fingerprint is model here and other there"),
        ({"tp_size": 2}, r"group 0 of decode-0 has kv heads 0\.\.1 of 2, .* not those of tensor-parallel rank 0 of 2"),
        ({"pp_rank": 1}, "rank 0 of 1, pipeline stage 1 of 1"),
        (
            {"layouts": (replace(LAYOUT, head_dim=8),), "pools": (MemRegion(4096, 6 * LAYOUT.slot_nbytes),)},
            "head_dim of layer group 0: 4 here, 8 there",
        ),
        (
            {"layouts": (replace(LAYOUT, layers=(0,)),), "pools": (MemRegion(4096, 3 * LAYOUT.slot_nbytes // 2),)},
            "layers 1 are missing there",
        ),
        ({"layouts": (WIDER,), "pools": (MemRegion(4096, 3 * WIDER.slot_nbytes),)}, "layers 2 are missing here"),
        ({"pools": ()}, "1 layouts, 0 pools"),
        ({"pools": (MemRegion(4096, 5),)}, "pool 0 has 5 bytes"),
        ({"generations": (MemRegion(65536, 8),)}, "8 bytes of generations"),
        ({"incarnation": ""}, "incarnation or the handle key is missing"),
    ],
)
def test_the_first_difference_is_named_with_both_workers(
    rank: RankInfo, change: dict[str, object], message: str
) -> None:
    other = replace(rank, worker="decode-0", **change)  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePeerError, match=message) as caught:
        check_peer(rank, other)
    assert "prefill-0 and decode-0 cannot exchange KV" in caught.value.message
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_ranks_of_workers_of_several_ranks_pair(rank: RankInfo) -> None:
    shards = [LAYOUT.shard(tp_rank, 2, [layer]) for tp_rank in range(2) for layer in LAYOUT.layers]
    for number, shard in enumerate(shards):
        assert shard is not None
        sizes = {"tp_rank": number // 2, "tp_size": 2, "pp_rank": number % 2, "pp_size": 2}
        pools = (MemRegion(4096, 3 * shard.slot_nbytes),)
        check_peer(rank, replace(rank, worker="decode-0", layouts=(shard,), pools=pools, **sizes))


def test_resolutions_that_cannot_talk(rank: RankInfo, resolved: Resolution) -> None:
    other = replace(rank, worker="decode-0", resolution=replace(resolved, manager="V1"))
    with pytest.raises(IncompatiblePeerError, match="V1"):
        check_peer(rank, other)
