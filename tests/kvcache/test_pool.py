"""The memory of a pool: sizes, alignment, views, claims."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch

from kvferry.core import AxisOrder, ConfigError, DType, GroupKind, KVLayout
from kvferry.kvcache import create_manager
from kvferry.kvcache.pool import (
    HUGE_PAGE_NBYTES,
    PAGE_NBYTES,
    Pages,
    blocks_for_budget,
    blocks_per_state,
    build_pool,
    slot_counts,
)

LAYOUT = KVLayout(GroupKind.FULL, (0, 3, 5), 2, 8, tokens_per_block=4)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("order", list(AxisOrder))
def test_a_pool_is_zero_aligned_and_viewed_in_slot_order(dtype: DType, order: AxisOrder) -> None:
    layout = dataclasses.replace(LAYOUT, dtype=dtype, axis_order=order)
    pool = build_pool(layout, 7, "cpu")
    assert pool.region.addr % PAGE_NBYTES == 0
    assert pool.generation_region.addr % PAGE_NBYTES == 0
    assert pool.region.nbytes == 7 * layout.slot_nbytes
    assert (pool.generation_region.nbytes, pool.generations.dtype) == (56, torch.int64)
    inner = (2, 4) if order is AxisOrder.HEAD_TOKEN else (4, 2)
    row = 12 if dtype is DType.INT8 else 8  # a scale stands behind the bytes
    assert tuple(pool.view.shape) == (7, 3, 2, *inner, row)
    assert not pool.buffer.any()
    pool.view[2, 1, 1, 0, 1, 3] = 1
    written = int(pool.buffer.nonzero()[0])
    element = (((1 * 2 + 1) * inner[0] + 0) * inner[1] + 1) * row + 3
    assert written // dtype.nbytes == 2 * layout.slot_nbytes // dtype.nbytes + element


def test_all_groups_get_as_many_blocks_as_the_budget_pays_for() -> None:
    latent = KVLayout(GroupKind.MLA, (1,), 1, 24, tokens_per_block=4, planes=1)
    row = LAYOUT.slot_nbytes + latent.slot_nbytes
    assert blocks_for_budget([LAYOUT, latent], 10 * row + row - 1) == 10


def nemotron_h_8b() -> list[KVLayout]:
    """4 attention layers of 8 heads, 24 Mamba2 layers of 128 heads, 64 wide, with states of 128; 10,240 channels."""
    attention = KVLayout(GroupKind.FULL, (7, 18, 29, 40), 8, 128, dtype=DType.BFLOAT16, tokens_per_block=16)
    mamba = tuple(range(100, 124))
    conv = KVLayout(GroupKind.CONV, mamba, 10_240, 3, dtype=DType.BFLOAT16, tokens_per_block=1, planes=1)
    ssm = KVLayout(GroupKind.SSM, mamba, 128, 64 * 128, tokens_per_block=1, planes=1)
    return [attention, conv, ssm]


def test_large_states_leave_most_of_the_budget_to_what_requests_hold() -> None:
    layouts = nemotron_h_8b()
    row, state = layouts[0].slot_nbytes, layouts[1].slot_nbytes + layouts[2].slot_nbytes
    assert 380 < state / row < 400
    blocks = blocks_for_budget(layouts, 8 << 30, typical_tokens=4096)
    _, *states = slot_counts(layouts, blocks, 4096)
    # A request of 4096 tokens holds 256 blocks, which take less than a state: a live one and a snapshot for each.
    assert blocks_per_state(layouts, 4096) == 128
    assert states == [-(-blocks // 128)] * 2
    assert blocks // 256 == (8 << 30) // (256 * row + 2 * state) == 31
    # By a fixed share of sixteen blocks there was room for a sixth of that.
    assert blocks_for_budget(layouts, 8 << 30) // 256 == 5
    assert blocks * row + states[0] * state <= 8 << 30


@pytest.mark.parametrize(
    ("typical", "expected"),
    [
        (None, 16),
        (4096, 128),
        (64 * 1024, 4096 // (1 + 4096 * 4 // 1538)),  # its blocks take as much as ten states: a live one, ten snapshots
        (100, 3),
        (1, 1),
    ],
)
def test_states_per_request_go_by_what_they_take(typical: int | None, expected: int) -> None:
    assert blocks_per_state(nemotron_h_8b(), typical) == expected


def test_small_states_are_as_many_as_snapshots_are_taken() -> None:
    state = KVLayout(GroupKind.SSM, (3,), 1, 1, tokens_per_block=1, planes=1)
    assert blocks_per_state([LAYOUT, state], 4096) == 16
    assert blocks_per_state([LAYOUT], 4096) == 16


def test_a_budget_below_one_block_names_the_setting_and_the_least() -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache\.bytes .* at least {LAYOUT.slot_nbytes}") as caught:
        blocks_for_budget([LAYOUT], LAYOUT.slot_nbytes - 1)
    assert caught.value.field == "kv_cache.bytes"


@pytest.mark.parametrize("setting", ["kv_cache.bytes", "kv_cache.host_bytes"])
def test_memory_that_cannot_be_had_names_the_setting(setting: str) -> None:
    nbytes = {"kv_cache.bytes": 1 << 16, "kv_cache.host_bytes": 0} | {setting: 1 << 60}
    with pytest.raises(ConfigError, match=rf"{setting} asks for 11529\d+ bytes of cpu memory") as caught:
        create_manager("V1", [LAYOUT], nbytes["kv_cache.bytes"], host_bytes=nbytes["kv_cache.host_bytes"])
    assert caught.value.field == setting


@pytest.mark.parametrize("side", ["before", "behind"])
def test_what_is_written_beyond_a_pool_shows(side: str) -> None:
    pools = [build_pool(LAYOUT, 3, "cpu", guard=True) for _ in range(2)]
    pages = Pages(pools, debug=True)
    pages.check_integrity()
    pool = pools[1]
    assert pool.region.addr % PAGE_NBYTES == 0
    assert pool.region.nbytes == 3 * LAYOUT.slot_nbytes
    at = pool.region.addr - 1 if side == "before" else pool.region.addr + pool.region.nbytes
    ctypes.memset(at, 0, 1)
    with pytest.raises(AssertionError, match=f"{side} the pool of layer group 1"):
        pages.check_integrity()


def test_claims_raise_generations() -> None:
    pool = build_pool(LAYOUT, 4, "cpu")
    pages = Pages([pool], debug=False)
    pages.claim(0, [1])
    pages.claim(0, [3, 1])
    assert pool.generations.tolist() == [0, 2, 0, 1]
    assert pages.generations(0, [3, 1]) == (1, 2)
    assert not pool.buffer.any()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8])
def test_debug_fills_claimed_pages_with_nan(dtype: DType) -> None:
    pool = build_pool(dataclasses.replace(LAYOUT, dtype=dtype), 4, "cpu")
    Pages([pool], debug=True).claim(0, [1, 2])
    assert bool(pool.view[1:3].float().isnan().all())
    assert not pool.view[0].float().any()
    assert not pool.view[3].float().any()


def test_pools_are_built_where_they_are_told() -> None:
    taken: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(torch.zeros(nbytes, dtype=torch.uint8))
        return taken[-1]

    pool = build_pool(LAYOUT, 7, "cpu", allocate)
    assert [pool.region.addr, pool.generation_region.addr] == [tensor.data_ptr() for tensor in taken]
    assert [len(tensor) for tensor in taken] == [7 * LAYOUT.slot_nbytes, 56]
    with pytest.raises(ConfigError, match="host memory") as caught:
        build_pool(LAYOUT, 7, "cuda:0", allocate)
    assert caught.value.field == "engine.device"


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a kernel that gives out no huge pages"
)
def test_large_pools_ask_for_huge_pages() -> None:
    layout = dataclasses.replace(LAYOUT, tokens_per_block=256)
    pool = build_pool(layout, HUGE_PAGE_NBYTES // layout.slot_nbytes + 1, "cpu")
    assert not pool.buffer.any()
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, stop = (int(address, 16) for address in first.split("-"))
            inside = start <= pool.region.addr < stop
        elif inside and first == "VmFlags:":
            flags = rest
    assert "hg" in flags.split()
    pool.buffer.fill_(7)
    assert bool((pool.buffer == 7).all())
