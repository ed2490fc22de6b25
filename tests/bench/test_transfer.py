"""The transfer benchmark moves what it says, compares like with like, and notices wrong bytes."""

from __future__ import annotations

import itertools
import json

import pytest
from libraries import needs_mooncake

from kvferry.bench import transfer, transfer_shapes
from kvferry.bench.transfer_shapes import Shape, place, route_resolution
from kvferry.core import GroupKind, KVLayout, Registry

TINY = Shape(KVLayout(GroupKind.FULL, layers=(0, 1, 2), kv_heads=2, head_dim=16), (48, 256))


@pytest.fixture
def one_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a Llama in both processes: the source process knows only the registered names."""
    shapes: Registry[Shape] = Registry("cache shape", "shape")
    full = transfer_shapes.SHAPES.get("smollm2")
    shapes.register("smollm2", Shape(full.layout, (128,)))
    monkeypatch.setattr(transfer, "SHAPES", shapes)


ROUTES = [
    pytest.param(route, marks=needs_mooncake if route.startswith("MOONCAKE") else ()) for route in transfer.ROUTES
]


@pytest.mark.parametrize("route", ROUTES)
def test_rows_of_a_route(route: str, one_small_shape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "IDLE_S", 0.1)
    monkeypatch.setattr(transfer, "SETTLE_S", 0.0)
    monkeypatch.setattr(transfer, "PART_TOKENS", 32)
    rows, hand_offs, idle = transfer.measure([route], ["smollm2"], rounds=2, prefill_s={128: 1.0})
    assert [(row.tokens, row.placement) for row in rows] == [(128, "contiguous"), (128, "fragmented")]
    assert rows[0].copies == 1 < rows[1].copies
    for row in rows:
        assert f"{row.backend}/{row.runtime}" == route
        assert row.nbytes == 128 * 30 * 2 * 3 * 64 * 4
        assert row.gbytes_per_s == pytest.approx(row.nbytes / row.load_ms / 1e6)
        assert row.memcpy_fraction == pytest.approx(row.gbytes_per_s / row.memcpy_gbytes_per_s)
        assert row.ttft_share == pytest.approx(row.load_ms / (1e3 + row.load_ms))
    assert [row.route for row in idle] == [route]
    styles = [("prefill_first", "pull"), ("decode_first", "pull"), ("decode_first", "push")]
    assert [(row.schedule, row.flow) for row in hand_offs] == (styles[:2] if "MOONCAKE" in route else styles)
    for hand_off in hand_offs:
        assert f"{hand_off.backend}/{hand_off.runtime}" == route
        assert (hand_off.tokens, hand_off.part_tokens) == (128, 128 if hand_off.schedule == "prefill_first" else 32)
        assert hand_off.overhead_ms > 0
        assert hand_off.exposed_share == pytest.approx(hand_off.exposed_ms / (1e3 + hand_off.exposed_ms))
    assert hand_offs[0].overhead_ms > hand_offs[0].calls_ms > 0


def test_json_holds_the_rows_and_the_machine(
    one_small_shape: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer, "IDLE_S", 0.1)
    monkeypatch.setattr(transfer, "SETTLE_S", 0.0)
    transfer.main(["--route", "SHM/PYTHON", "--shape", "smollm2", "--rounds", "1", "--no-prefill", "--json"])
    printed = json.loads(capsys.readouterr().out)
    wanted = {"backend", "runtime", "manager", "shape", "tokens", "nbytes", "gbytes_per_s", "memcpy_fraction"}
    assert all(wanted | {"overhead_ms", "ttft_share"} <= set(row) for row in printed["rows"])
    assert printed["rows"][0]["ttft_share"] is None
    assert [row["flow"] for row in printed["hand_offs"]] == ["pull", "pull", "push"]
    assert printed["hand_offs"][2]["exposed_share"] is None
    assert set(printed["machine"]["idle"]) == {"SHM/PYTHON"}


def _row(backend: str, shape: str, gbytes_per_s: float, bare_fraction: float) -> transfer.TransferRow:
    return transfer.TransferRow(
        backend=backend,
        runtime="PYTHON",
        manager="V2",
        shape=shape,
        tokens=16,
        nbytes=1,
        gbytes_per_s=gbytes_per_s,
        memcpy_fraction=0.5,
        overhead_ms=1.0,
        ttft_share=None,
        placement="fragmented",
        copies=1,
        bare_fraction=bare_fraction,
        memcpy_gbytes_per_s=2.0,
        load_ms=1.0,
    )


def test_rows_stand_beside_mooncakes_engine_on_the_same_copies() -> None:
    rows = [_row("NIXL", "a", 2.0, 0.9), _row("MOONCAKE", "a", 0.25, 0.5), _row("NIXL", "b", 2.0, 0.9)]
    assert [row.times_mooncake for row in transfer.compare_to_mooncake(rows)] == [4.0, 0.5, None]


def test_blocks_of_16_kib() -> None:
    shape = transfer_shapes.SHAPES.get("pieces-16k")
    assert shape.layout.slot_nbytes == 16 * 1024
    assert (shape.blocks, shape.placements) == (1024, ("fragmented",))


def test_placements() -> None:
    assert place("contiguous", 4, 16, seed=1) == (0, 1, 2, 3)
    ids = place("fragmented", 12, 16, seed=1)
    assert len(set(ids)) == 12
    assert sum(b == a + 1 for a, b in itertools.pairwise(ids)) < 4


def test_a_pool_says_which_block_it_is() -> None:
    pool = transfer_shapes.make_pool(TINY.layout, TINY.blocks, None)
    slot = TINY.layout.slot_nbytes
    words = pool.buffer[3 * slot : 4 * slot].view(transfer.torch.int64)
    assert (int(words[0]), int(words[-1])) == (3 * slot // 8, 4 * slot // 8 - 1)


@pytest.mark.parametrize(("route", "manager"), [("NIXL/PYTHON", "V2"), ("SHM/CPP", "V1")])
def test_a_route_is_measured_with_what_it_drives(route: str, manager: str) -> None:
    resolution = route_resolution(route)
    assert (resolution.transceiver, resolution.manager) == (route, manager)
