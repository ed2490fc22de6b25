"""KV between two real processes over every route, and what happens when one of them dies, stops or comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from libraries import needs_mooncake
from transfer_processes import (
    BLOCKS,
    DIGEST,
    LAYOUT,
    MOONCAKE,
    NIXL,
    NIXL_CPP,
    PAIRS,
    SHM,
    SHM_CPP,
    THIRD_PARTY,
    UCX,
    Destination,
    SourceProcess,
)

from kvferry.core import BlockTable, TokenRange, TransferError
from kvferry.kvcache import BlockHold
from kvferry.resolution import default_catalog
from kvferry.transceiver.implementation import RuntimeTimes

MOONCAKE_PAIR = pytest.param((MOONCAKE, MOONCAKE), marks=needs_mooncake)


@pytest.fixture(params=[*PAIRS, MOONCAKE_PAIR], ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def routes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """(source's, destination's); the third party's distribution is on the path."""
    monkeypatch.syspath_prepend(THIRD_PARTY)
    default_catalog.cache_clear()
    yield request.param
    default_catalog.cache_clear()


@pytest.fixture
def source(routes: tuple[str, str]) -> Iterator[SourceProcess]:
    process = SourceProcess("prefill-life-1", route=routes[0])
    yield process
    process.close()


@pytest.fixture
def destination(routes: tuple[str, str]) -> Iterator[Destination]:
    made = Destination(route=routes[1])
    yield made
    made.close()


def test_every_byte_arrives(source: SourceProcess, destination: Destination) -> None:
    destination.transceiver.connect(source.endpoint)
    ids, local = [3, 4, 5, 17, 9], [40, 41, 42, 2, 63]
    result = destination.load(source.advertise(ids, 80), local, TokenRange(0, 80))
    assert result.error is None
    assert (result.nbytes, result.copies) == (80 * LAYOUT.token_nbytes, 3)
    assert destination.bytes_of(local) == source.bytes_of(ids)
    rest = [block for block in range(BLOCKS) if block not in local]
    assert not any(destination.bytes_of(rest))
    source.wait_for(open_holds=0, handed_off=1)


def test_first_contact_on_the_first_load_and_a_partial_block(source: SourceProcess, destination: Destination) -> None:
    result = destination.load(source.advertise([8, 9], 21), [0, 1], TokenRange(0, 21))
    assert (result.error, result.nbytes) == (None, 21 * LAYOUT.token_nbytes)
    assert destination.bytes_of([0]) == source.bytes_of([8])


def test_a_block_overwritten_at_the_source(source: SourceProcess, destination: Destination) -> None:
    handle = source.advertise([3, 4], 32)
    source.ask("overwrite", id=4)
    error = destination.load(handle, [0, 1], TokenRange(0, 32)).error
    assert error is not None
    assert "reused" in error
    source.wait_for(open_holds=0)


def test_killed_before_the_load(source: SourceProcess, destination: Destination) -> None:
    destination.transceiver.connect(source.endpoint)
    handle = source.advertise([3], 16)
    source.signal(signal.SIGKILL)
    source.process.wait(10)
    result = destination.load(handle, [0], TokenRange(0, 16))
    assert result.error is not None
    assert result.in_doubt is False


def test_killed_during_the_load(routes: tuple[str, str]) -> None:
    blocks = 8192  # 134 MB: long enough to be hit, and if it is not, every byte must be there
    source = SourceProcess("prefill-life-1", blocks=blocks, route=routes[0])
    destination = Destination(blocks=blocks, route=routes[1])
    try:
        destination.transceiver.connect(source.endpoint)
        handle = source.advertise(list(range(blocks)), blocks * 16)
        reference = source.bytes_of([0, blocks - 1])
        done, results = destination.start(handle, list(range(blocks)), TokenRange(0, blocks * 16))
        source.signal(signal.SIGKILL)
        assert done.wait(30)
        assert results[0].in_doubt is False
        assert results[0].error is not None or destination.bytes_of([0, blocks - 1]) == reference
    finally:
        source.close()
        destination.close()


def test_restarted_on_the_same_port(source: SourceProcess, destination: Destination) -> None:
    stale = source.advertise([3], 16)
    assert destination.load(source.advertise([4], 16), [0], TokenRange(0, 16)).error is None
    source.close()
    reborn = SourceProcess("prefill-life-2", port=source.port, route=source.route)
    try:
        assert destination.load(stale, [1], TokenRange(0, 16)).error is not None
        deadline_s = time.monotonic() + 10
        while True:  # gRPC backs off before it dials a port again that refused it
            try:
                assert destination.transceiver.connect(reborn.endpoint).incarnation == "prefill-life-2"
                break
            except TransferError:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        assert destination.load(reborn.advertise([5], 16), [1], TokenRange(0, 16)).error is None
        assert destination.bytes_of([1]) == reborn.bytes_of([5])
        error = destination.load(stale, [2], TokenRange(0, 16)).error
        assert error is not None
        assert "restarted" in error
    finally:
        reborn.close()


@pytest.mark.parametrize("route", [NIXL, UCX, pytest.param(MOONCAKE, marks=needs_mooncake)])
def test_a_stopped_source_over_tcp_never_writes_late(
    monkeypatch: pytest.MonkeyPatch, fake_hold: Callable[..., BlockHold], route: str
) -> None:
    """Over tcp a stopped peer keeps an operation in progress for ever, and its bytes would land when it goes on."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source = SourceProcess("prefill-life-1", route=route)
    destination = Destination(transfer_timeout_ms=1000, route=route)
    try:
        destination.transceiver.connect(source.endpoint)
        ids = list(range(BLOCKS))
        handle = source.advertise(ids, BLOCKS * 16)
        source.signal(signal.SIGSTOP)
        result = destination.load(handle, ids, TokenRange(0, BLOCKS * 16))
        assert result.error is not None
        assert result.in_doubt is False
        assert destination.transceiver.stats().fences >= 1
        destination.pool.buffer.zero_()
        # A session of its own keeps this side polling: without that nothing could land, fenced or not.
        destination.transceiver.advertise(fake_hold((BlockTable((0,), (0,)),)), TokenRange(0, 16), DIGEST, lambda: None)
        source.signal(signal.SIGCONT)
        time.sleep(1.0)
        assert not destination.pool.buffer.any()
    finally:
        source.close()
        destination.close()


def test_a_lost_reader_costs_the_source_a_lease_at_most(routes: tuple[str, str]) -> None:
    source = SourceProcess("prefill-life-1", lease_s=0.5, route=routes[0])
    try:
        source.advertise([3], 16)
        source.wait_for(open_holds=0, expired_leases=1)
    finally:
        source.close()


IDLE_ROUTES = [NIXL, NIXL_CPP, UCX, SHM, SHM_CPP, pytest.param(MOONCAKE, marks=needs_mooncake)]


@pytest.mark.parametrize("route", IDLE_ROUTES)
def test_who_has_nothing_to_do_uses_less_than_a_fiftieth_of_a_core(route: str) -> None:
    """On both sides, once the target has stopped helping a new peer along."""
    source, destination = SourceProcess("prefill-life-1", route=route), Destination(route=route)
    try:
        assert destination.load(source.advertise([3], 16), [0], TokenRange(0, 16)).error is None
        time.sleep(RuntimeTimes(1.0).first_contact_s + 0.5)
        window_s = 2.0
        here_s, there_s = time.process_time(), source.ask("cpu")["seconds"]
        time.sleep(window_s)
        there_s = source.ask("cpu")["seconds"] - there_s
        here_s = time.process_time() - here_s
        assert there_s / window_s < 0.02
        assert here_s / window_s < 0.02
    finally:
        source.close()
        destination.close()


@pytest.mark.parametrize("route", [SHM, UCX])
def test_a_stopped_source_on_this_host_is_read_all_the_same(route: str) -> None:
    """One-sided in earnest: its process need not run. Over tcp, which UCX would take otherwise, it must."""
    source, destination = SourceProcess("prefill-life-1", route=route), Destination(route=route)
    try:
        destination.transceiver.connect(source.endpoint)
        handle, expected = source.advertise([3, 4], 32), source.bytes_of([3, 4])
        source.signal(signal.SIGSTOP)
        assert destination.load(handle, [0, 1], TokenRange(0, 32)).error is None
        assert destination.bytes_of([0, 1]) == expected
        source.signal(signal.SIGCONT)
        source.wait_for(open_holds=0, handed_off=1)
    finally:
        source.close()
        destination.close()
