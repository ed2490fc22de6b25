"""KV that is pushed between two real processes over every route that does that, and writers that die or stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from transfer_processes import (
    BLOCKS,
    LAYOUT,
    NIXL,
    PAIRS,
    THIRD_PARTY,
    UCX,
    Destination,
    SourceProcess,
)

from kvferry.resolution import default_catalog


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def ends(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SourceProcess, Destination]]:
    monkeypatch.syspath_prepend(THIRD_PARTY)
    default_catalog.cache_clear()
    source, destination = SourceProcess("prefill-life-1", route=request.param[0]), Destination(route=request.param[1])
    yield source, destination
    source.close()
    destination.close()
    default_catalog.cache_clear()


class TestPushes:
    def test_every_byte_is_written(self, ends: tuple[SourceProcess, Destination]) -> None:
        source, destination = ends
        ids, local = [3, 4, 5, 17, 9], [40, 41, 42, 2, 63]
        push = destination.grant(source, local, 80)
        for start, stop in ((0, 32), (32, 37), (37, 80)):
            assert not push.done.is_set()
            assert push.part(ids, start, stop)
        result = push.result()
        assert (result.error, result.nbytes) == (None, 80 * LAYOUT.token_nbytes)
        assert destination.bytes_of(local) == source.bytes_of(ids)
        rest = [block for block in range(BLOCKS) if block not in local]
        assert not any(destination.bytes_of(rest))
        source.wait_for(handed_off=1)

    def test_a_writer_killed_between_parts(self, ends: tuple[SourceProcess, Destination]) -> None:
        """Its pages are quiet once its death is proven: nobody has said that they are."""
        source, destination = ends
        push = destination.grant(source, [40, 41], 32)
        assert push.part([3, 4], 0, 16)
        source.signal(signal.SIGKILL)
        source.process.wait(10)
        result = push.result()
        assert (result.error, result.in_doubt) == ("the writer's process has ended", False)
        assert destination.transceiver.stats().fences == 1

    def test_a_stopped_writer_keeps_its_pages(self, ends: tuple[SourceProcess, Destination]) -> None:
        source, destination = ends
        push = destination.grant(source, [40, 41], 32)
        assert push.part([3, 4], 0, 16)
        source.signal(signal.SIGSTOP)
        destination.transceiver.cancel_load(push.load_id)
        assert push.result().in_doubt is True
        assert not destination.quiet_within(push.load_id, 1.5)
        source.signal(signal.SIGCONT)
        assert destination.quiet_within(push.load_id, 10)
        before = destination.bytes_of([41])
        assert push.part([3, 4], 16, 32)  # released, and not written
        assert destination.bytes_of([41]) == before


@pytest.mark.parametrize("route", [NIXL, UCX])
def test_a_stopped_writer_over_tcp_writes_nothing_once_its_pages_are_quiet(
    monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source = SourceProcess("prefill-life-1", route=route)
    destination = Destination(transfer_timeout_ms=1000, route=route)
    try:
        ids = list(range(BLOCKS))
        push = destination.grant(source, ids, BLOCKS * 16)
        assert push.part(ids, 0, 16)
        source.ask("push", push_id=push.push_id, ids=ids, start=16, stop=BLOCKS * 16, wait_s=0)
        source.signal(signal.SIGSTOP)
        destination.transceiver.cancel_load(push.load_id)
        result = push.result()
        source.signal(signal.SIGCONT)
        assert not result.in_doubt or destination.quiet_within(push.load_id, 20)
        destination.pool.buffer.zero_()
        time.sleep(1.0)
        assert not destination.pool.buffer.any()
    finally:
        source.close()
        destination.close()
