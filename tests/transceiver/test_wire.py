"""KV in a wire format: what a value may lose, what else must not change, and that slots and pages come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvferry.core import (
    AxisOrder,
    BlockTable,
    ConfigError,
    DType,
    GroupKind,
    KVLayout,
    OverloadedError,
    Role,
    TokenRange,
)
from kvferry.kvcache import KVPool
from kvferry.kvcache.pool import build_pool
from kvferry.transceiver import IncompatiblePeerError, LoadResult, WireFormat
from kvferry.transceiver.faulty import Fault
from kvferry.transceiver.wire_format import decode, encode, wire_layouts
from kvferry.transceiver.wire_pool import WirePools
from kvferry.transceiver.wire_transceiver import WireTransceiver

LAYOUT = KVLayout(GroupKind.FULL, layers=(0, 1), kv_heads=2, head_dim=8, tokens_per_block=4)
DIGEST = b"d" * 32
BLOCKS = 16


def values(layout: KVLayout, seed: int) -> KVPool:
    pool = build_pool(layout, BLOCKS, "cpu")
    pool.view.copy_(torch.randn(pool.view.shape, generator=torch.Generator().manual_seed(seed)) * 3)
    return pool


def limits(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """How far each value may be off: half a step of int8, a 16th of itself (3 bits of mantissa) in fp8."""
    largest = rows.abs().amax(-1, keepdim=True)
    if wire is WireFormat.INT8:
        return (largest / 127 * 0.501).expand_as(rows)
    return rows.abs() / 16 + largest / 448 * 2**-9


@pytest.mark.parametrize("wire", [WireFormat.INT8, WireFormat.FP8])
@pytest.mark.parametrize("order", list(AxisOrder))
def test_a_row_keeps_its_values_within_a_step(wire: WireFormat, order: AxisOrder) -> None:
    stored = values(replace(LAYOUT, axis_order=order), 0)
    stored.view[3, 0, 0] = 0.0
    travelling = build_pool(wire_layouts([stored.layout], wire)[0], 4, "cpu")
    encode(stored, [3, 5], travelling, [2, 0])
    rows, found = stored.view[[3, 5]], decode(travelling, [2, 0])
    assert bool(((found - rows).abs() <= limits(rows, wire)).all())
    assert not torch.equal(found, rows)
    assert bool((found[0, 0, 0] == 0).all())


def test_stored_is_as_it_is() -> None:
    assert wire_layouts([LAYOUT], WireFormat.STORED) == (LAYOUT,)


@dataclass
class Wired:
    """A worker whose transceiver moves wire pools, and its stored pool."""

    worker: Any
    stored: KVPool
    pools: WirePools
    transceiver: WireTransceiver

    def advertise(self, ids: Sequence[int], tokens: TokenRange, hold_type: Any) -> tuple[bytes, Any]:
        hold = hold_type((BlockTable(tuple(ids), tuple(ids)),))
        return self.transceiver.advertise(hold, tokens, DIGEST, hold.release), hold

    def load(self, handle: bytes, ids: Sequence[int], tokens: TokenRange) -> Any:
        results: list[LoadResult] = []
        tables = (BlockTable(tuple(ids), ()),)
        load_id = self.transceiver.load(handle, DIGEST, tables, tokens, results.append)
        return load_id, results

    def free(self) -> int:
        return len(self.pools._free[0])


Join = Callable[..., Wired]


@pytest.fixture
def join(world: Any) -> Join:
    """join(role, endpoint, layout, wire): a worker in `world`, the slots of its wire pool as many as its blocks."""

    def make(
        role: Role, endpoint: str, layout: KVLayout = LAYOUT, wire: WireFormat = WireFormat.INT8, **times: Any
    ) -> Wired:
        (travelling,) = wire_layouts([layout], wire)
        worker = world.worker(role, endpoint, layout=travelling, blocks=BLOCKS, **times)
        typed = worker.pool.buffer.view(getattr(torch, travelling.dtype.value)).view(worker.pool.view.shape)
        stored = values(layout, len(endpoint) + (role is Role.DECODE))
        pools = WirePools([stored], [replace(worker.pool, view=typed)])
        return Wired(worker, stored, pools, WireTransceiver(worker.transceiver, pools))

    return make


@pytest.mark.parametrize("wire", [WireFormat.INT8, WireFormat.FP8])
def test_a_transfer_between_unlike_pools(
    join: Join, fake_hold: Any, eventually: Callable[..., None], wire: WireFormat
) -> None:
    """Other block sizes and number types, and a range that begins and ends within blocks."""
    prefill = join(Role.PREFILL, "p:1", LAYOUT, wire)
    decode_side = join(Role.DECODE, "d:1", replace(LAYOUT, tokens_per_block=8, dtype=DType.BFLOAT16), wire)
    before = decode_side.stored.view.clone()
    tokens = TokenRange(3, 18)
    handle, hold = prefill.advertise([7, 2, 9, 1, 4], TokenRange(0, 20), fake_hold)
    assert prefill.free() == BLOCKS - 5
    _, results = decode_side.load(handle, [5, 0, 3], tokens)
    eventually(lambda: len(results) == 1)
    assert results[0].error is None
    assert results[0].nbytes == len(tokens) * 2 * 2 * 2 * (8 + 4)  # layers, planes, heads, row and scale
    for position in range(24):
        target = [5, 0, 3][position // 8], position % 8
        found = decode_side.stored.view[target[0], ..., target[1], :].float()
        if position not in range(tokens.start, tokens.stop):
            assert torch.equal(found, before[target[0], ..., target[1], :].float())
            continue
        sent = prefill.stored.view[[7, 2, 9, 1, 4][position // 4], ..., position % 4, :]
        rounding = sent.abs() / 128  # bfloat16
        assert bool(((found - sent).abs() <= limits(sent, wire) + rounding + 1e-6).all())
    untouched = [block for block in range(BLOCKS) if block not in (5, 0, 3)]
    assert torch.equal(decode_side.stored.view[untouched], before[untouched])
    eventually(hold.released.is_set)
    eventually(lambda: prefill.free() == decode_side.free() == BLOCKS)


def test_a_window_that_lacks_more_than_the_rest(join: Join, fake_hold: Any, eventually: Callable[..., None]) -> None:
    """Its table begins blocks before the positions asked for; the source has what the token at 22 looks back to."""
    window = replace(LAYOUT, kind=GroupKind.WINDOW, window=8)
    prefill, decode_side = join(Role.PREFILL, "p:1", window), join(Role.DECODE, "d:1", window)
    given, taken, tokens = {3: 7, 4: 2, 5: 9}, {3: 5, 4: 0, 5: 3}, TokenRange(20, 22)
    hold = fake_hold((BlockTable(tuple(given.values()), tuple(given.values()), 3),))
    before = decode_side.stored.view.clone()
    handle = prefill.transceiver.advertise(hold, TokenRange(0, 22), DIGEST, hold.release)
    results: list[LoadResult] = []
    tables = (BlockTable(tuple(taken.values()), (), 3),)
    decode_side.transceiver.load(handle, DIGEST, tables, tokens, results.append)
    eventually(lambda: len(results) == 1)
    assert (results[0].error, results[0].nbytes) == (None, 10 * 2 * 2 * 2 * (8 + 4))
    for position in range(12, 24):
        block, offset = divmod(position, 4)
        found, sent = decode_side.stored.view[taken[block]], prefill.stored.view[given[block]]
        if position < 22:
            off = (found[..., offset, :] - sent[..., offset, :]).abs()
            assert bool((off <= limits(sent, WireFormat.INT8)[..., offset, :] + 1e-6).all())
        else:
            assert torch.equal(found[..., offset, :], before[taken[block], ..., offset, :])
    eventually(hold.released.is_set)
    eventually(lambda: prefill.free() == decode_side.free() == BLOCKS)


def test_an_empty_range_only_tells_the_source(join: Join, fake_hold: Any, eventually: Callable[..., None]) -> None:
    prefill, decode_side = join(Role.PREFILL, "p:1"), join(Role.DECODE, "d:1")
    handle, hold = prefill.advertise([7, 2], TokenRange(0, 8), fake_hold)
    _, results = decode_side.load(handle, [], TokenRange(8, 8))
    eventually(hold.released.is_set)
    eventually(lambda: len(results) == 1)
    assert (results[0].error, results[0].nbytes) == (None, 0)
    assert prefill.free() == BLOCKS


def test_withdrawn_and_refused_hand_offs_give_their_slots_back(
    join: Join, fake_hold: Any, eventually: Callable[..., None]
) -> None:
    prefill, decode_side = join(Role.PREFILL, "p:1"), join(Role.DECODE, "d:1")
    handle, hold = prefill.advertise([7, 2], TokenRange(0, 8), fake_hold)
    prefill.transceiver.withdraw(handle)
    assert hold.released.is_set()
    assert prefill.free() == BLOCKS
    before = decode_side.stored.view.clone()
    _, results = decode_side.load(b"forged", [1, 2], TokenRange(0, 8))
    eventually(lambda: len(results) == 1)
    assert results[0].error is not None
    assert decode_side.free() == BLOCKS
    assert torch.equal(decode_side.stored.view, before)


def test_without_room_a_hand_off_is_refused_and_a_load_declined(
    join: Join, fake_hold: Any, eventually: Callable[..., None]
) -> None:
    prefill, decode_side = join(Role.PREFILL, "p:1"), join(Role.DECODE, "d:1")
    handle, hold = prefill.advertise(range(10), TokenRange(0, 40), fake_hold)
    with pytest.raises(OverloadedError, match=r"7 blocks .* room for 6 .*transceiver\.wire_format"):
        prefill.advertise(range(7), TokenRange(0, 28), fake_hold)
    assert prefill.free() == BLOCKS - 10
    taken = decode_side.pools.take((BlockTable(tuple(range(8)), ()),), TokenRange(0, 32))
    _, results = decode_side.load(handle, range(10), TokenRange(0, 40))
    eventually(lambda: len(results) == 1)
    assert "10 blocks are to be transferred, and there is room for 8" in results[0].error
    eventually(hold.released.is_set)
    decode_side.pools.give(taken)
    assert prefill.free() == decode_side.free() == BLOCKS


def test_pages_are_never_in_doubt_but_slots_are(join: Join, fake_hold: Any, eventually: Callable[..., None]) -> None:
    prefill = join(Role.PREFILL, "p:1")
    decode_side = join(Role.DECODE, "d:1", transfer_timeout_s=0.2, grace_s=0.1)
    decode_side.transceiver.connect("p:1")
    decode_side.worker.agent.inject(Fault.BLACK_HOLE)
    decode_side.worker.agent.fail_fences(1)
    before = decode_side.stored.view.clone()
    handle, _ = prefill.advertise([7, 2], TokenRange(0, 8), fake_hold)
    _, results = decode_side.load(handle, [1, 2], TokenRange(0, 8))
    eventually(lambda: len(results) == 1)
    assert results[0].error is not None
    assert not results[0].in_doubt
    assert torch.equal(decode_side.stored.view, before)
    eventually(lambda: decode_side.free() == BLOCKS)  # after a fence that succeeds


def test_peers_of_different_wire_formats_are_refused_by_name(join: Join) -> None:
    join(Role.PREFILL, "p:1", wire=WireFormat.FP8)
    decode_side = join(Role.DECODE, "d:1", wire=WireFormat.INT8)
    with pytest.raises(IncompatiblePeerError, match=r"int8.*float8_e4m3fn|float8_e4m3fn.*int8"):
        decode_side.transceiver.connect("p:1")


@pytest.mark.parametrize("wire", [WireFormat.INT8, WireFormat.FP8])
def test_a_cache_of_8_bits_travels_as_it_is(wire: WireFormat) -> None:
    layout = replace(LAYOUT, dtype=DType.INT8)
    assert wire_layouts([layout], WireFormat.STORED) == (layout,)
    with pytest.raises(ConfigError, match="has 8 bits already") as caught:
        wire_layouts([layout], wire)
    assert caught.value.field == "transceiver.wire_format"
