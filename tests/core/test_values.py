"""Layouts, digests, registry, state machines."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest

from kvferry.core import (
    REQUEST_TRANSITIONS,
    AxisOrder,
    ConfigError,
    DType,
    GroupKind,
    IllegalTransitionError,
    KVLayout,
    Lifecycle,
    Registry,
    RequestState,
    TokenRange,
    block_digests,
    head_range,
    scope_digest,
)

SMOLLM2 = KVLayout(GroupKind.FULL, tuple(range(30)), kv_heads=3, head_dim=64)


def test_slot_sizes_of_smollm2() -> None:
    assert SMOLLM2.row_nbytes == 256
    assert SMOLLM2.plane_nbytes == 3 * 16 * 256
    assert SMOLLM2.slot_nbytes == 737_280
    assert SMOLLM2.token_nbytes == 46_080
    assert [SMOLLM2.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_int8_rows_carry_their_scale_and_states_do_not() -> None:
    rows = dataclasses.replace(SMOLLM2, dtype=DType.INT8)
    assert (rows.row_nbytes, rows.token_nbytes, rows.slot_nbytes) == (68, 30 * 2 * 3 * 68, 16 * 30 * 2 * 3 * 68)
    assert dataclasses.replace(rows, kind=GroupKind.SSM).row_nbytes == 64
    assert dataclasses.replace(SMOLLM2, dtype=DType.BFLOAT16).row_nbytes == 128


@pytest.mark.parametrize(
    "change",
    [
        {"kind": GroupKind.WINDOW},
        {"layers": (0,)},
        {"kv_heads": 4},
        {"head_dim": 32},
        {"dtype": DType.BFLOAT16},
        {"tokens_per_block": 32},
        {"axis_order": AxisOrder.TOKEN_HEAD},
        {"window": 128},
        {"planes": 1},
        {"all_heads": 6},
        {"first_head": 1, "all_heads": 6},
    ],
)
def test_every_field_of_a_layout_is_in_its_fingerprint(change: dict[str, object]) -> None:
    assert dataclasses.replace(SMOLLM2, **change).fingerprint() != SMOLLM2.fingerprint()  # type: ignore[arg-type]
    assert dataclasses.replace(SMOLLM2).fingerprint() == SMOLLM2.fingerprint()


def test_the_heads_of_tensor_parallel_ranks() -> None:
    def held(heads: int, ranks: int) -> list[list[int]]:
        return [list(head_range(heads, rank, ranks)) for rank in range(ranks)]

    assert held(4, 2) == [[0, 1], [2, 3]]
    assert held(2, 4) == [[0], [0], [1], [1]]
    assert held(3, 2) == [[0, 1], [1, 2]]
    assert held(1, 3) == [[0], [0], [0]]
    with pytest.raises(ValueError, match="tensor-parallel rank 2 of 2"):
        head_range(4, 2, 2)


def test_a_rank_holds_a_shard_of_a_layout() -> None:
    shard = SMOLLM2.shard(1, 2, range(2, 5))
    assert shard is not None
    assert (shard.layers, list(shard.heads), shard.model_heads) == ((2, 3, 4), [1, 2], 3)
    assert SMOLLM2.shard(0, 1) == SMOLLM2
    assert SMOLLM2.shard(0, 1, [99]) is None
    with pytest.raises(ValueError, match="kv heads 2 and 1 more of 3"):
        dataclasses.replace(SMOLLM2, kv_heads=2, first_head=2, all_heads=3)


def test_digests_are_the_documented_chain() -> None:
    root = hashlib.sha256(b"kvferry.block.v1\0salt").digest()
    first = hashlib.sha256(root + struct.pack("<2I", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 4)).digest()
    assert scope_digest("salt") == root
    assert block_digests("salt", [1, 2, 3, 4, 5], 2) == [first, second]


def test_digests_name_the_whole_prefix() -> None:
    assert block_digests("", [1, 2, 9, 9], 2)[1] != block_digests("", [1, 3, 9, 9], 2)[1]
    assert block_digests("a", [1, 2], 2) != block_digests("b", [1, 2], 2)


def test_a_token_range_is_half_open() -> None:
    assert len(TokenRange(3, 7)) == 4
    with pytest.raises(ValueError, match="not a token range"):
        TokenRange(4, 3)


def test_registry_refuses_duplicates_and_names_choices() -> None:
    registry = Registry[int]("policy", "router.policy")
    assert registry.register("round_robin", 1) == 1
    with pytest.raises(ConfigError, match="twice"):
        registry.register("round_robin", 2)
    with pytest.raises(ConfigError, match="did you mean round_robin") as caught:
        registry.get("round-robin")
    assert caught.value.field == "router.policy"


def test_a_lifecycle_moves_only_along_its_table() -> None:
    request = Lifecycle(RequestState.QUEUED, REQUEST_TRANSITIONS)
    request.to(RequestState.PREFILLING)
    with pytest.raises(IllegalTransitionError, match="PREFILLING -> DECODING"):
        request.to(RequestState.DECODING)
    assert request.state is RequestState.PREFILLING
    request.to(RequestState.FINISHED)
    assert request.ended


def test_every_state_of_a_request_can_end() -> None:
    ends = {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}
    for state, targets in REQUEST_TRANSITIONS.items():
        assert (state in ends) == (not targets)
        if targets:
            assert {RequestState.FAILED, RequestState.CANCELLED} <= targets
