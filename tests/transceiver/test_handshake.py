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
        ({"tp_size": 2}, "tp_size is 1 here and 2 there"),
        ({"pp_rank": 1}, "pp_rank is 0 here and 1 there"),
        ({"layouts": (replace(LAYOUT, head_dim=8),)}, "head_dim of layer group 0: 4 here, 8 there"),
        ({"layouts": (replace(LAYOUT, layers=(0, 1, 2)),)}, r"layers of group 0: 0\.\.1"),
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


def test_resolutions_that_cannot_talk(rank: RankInfo, resolved: Resolution) -> None:
    other = replace(rank, worker="decode-0", resolution=replace(resolved, manager="V1"))
    with pytest.raises(IncompatiblePeerError, match="V1"):
        check_peer(rank, other)
