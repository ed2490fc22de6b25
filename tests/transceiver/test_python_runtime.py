"""The whole runtime, both sides in one process, over an agent that can be told to misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.core import BlockTable, Role, TokenRange, TransferError
from kvferry.transceiver import CancelOutcome, FailureClass, IncompatiblePeerError
from kvferry.transceiver.base import LoadResult
from kvferry.transceiver.cpp_runtime import CppTransceiver
from kvferry.transceiver.faulty import Fault, Target

Eventually = Callable[..., None]


def test_load_moves_every_byte_and_releases_the_source(pair: tuple[Any, Any], eventually: Eventually) -> None:
    prefill, decode = pair
    before = decode.blocks(range(32))
    handle, hold = prefill.advertise([5, 6, 9], 12)
    load = decode.load(handle, [3, 4, 20], TokenRange(0, 12))
    result = load.wait()
    assert result.error is None
    assert result.nbytes == 12 * prefill.pool.layout.token_nbytes
    assert result.copies == 2
    assert torch.equal(decode.blocks([3, 4, 20]), prefill.blocks([5, 6, 9]))
    untouched = [block for block in range(32) if block not in (3, 4, 20)]
    assert torch.equal(decode.blocks(untouched), before[untouched])
    eventually(hold.released.is_set)
    eventually(lambda: prefill.transceiver.stats().handed_off == 1)
    assert prefill.transceiver.stats().open_holds == 0
    assert decode.transceiver.stats().loads == 1


def test_only_the_suffix_moves(pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    before = decode.pool.view[[3, 4]].clone()
    handle, _ = prefill.advertise([5, 6], 7)
    result = decode.load(handle, [3, 4], TokenRange(2, 7)).wait()
    assert result.error is None
    assert result.nbytes == 5 * prefill.pool.layout.token_nbytes
    source, local = prefill.pool.view, decode.pool.view
    assert torch.equal(local[3, ..., 2:, :], source[5, ..., 2:, :])
    assert torch.equal(local[4, ..., :3, :], source[6, ..., :3, :])
    assert torch.equal(local[3, ..., :2, :], before[0, ..., :2, :])
    assert torch.equal(local[4, ..., 3:, :], before[1, ..., 3:, :])


def test_an_empty_range_moves_nothing_and_releases_the_source(pair: tuple[Any, Any], eventually: Eventually) -> None:
    prefill, decode = pair
    before = decode.blocks(range(32))
    handle, hold = prefill.advertise([5, 6], 7)
    result = decode.load(handle, [3, 4], TokenRange(7, 7)).wait()
    assert (result.error, result.nbytes, result.copies) == (None, 0, 0)
    assert torch.equal(decode.blocks(range(32)), before)
    eventually(hold.released.is_set)


def test_on_done_comes_once_also_when_notifications_are_doubled(pair: tuple[Any, Any], eventually: Eventually) -> None:
    prefill, decode = pair
    decode.agent.inject(Fault.DUPLICATE, Target.NOTIFICATION, count=99)
    decode.agent.inject(Fault.DUPLICATE, count=99)
    handles = [prefill.advertise([block], 4) for block in range(8)]
    loads = [decode.load(handle, [block], TokenRange(0, 4)) for block, (handle, _) in enumerate(handles)]
    assert [load.wait().error for load in loads] == [None] * 8
    eventually(lambda: all(hold.released.is_set() for _, hold in handles))
    eventually(lambda: prefill.transceiver.stats().stray_notifications == 8)  # the second DONE of each
    assert [len(load.results) for load in loads] == [1] * 8
    assert prefill.transceiver.stats().callback_errors == 0


def test_lost_notifications_leave_the_release_to_the_lease(world: Any, eventually: Eventually) -> None:
    prefill, decode = world.worker(Role.PREFILL, "p:1", lease_s=0.2), world.worker(Role.DECODE, "d:1")
    decode.agent.inject(Fault.DROP, Target.NOTIFICATION, count=2)
    handle, hold = prefill.advertise([5], 4)
    assert decode.load(handle, [3], TokenRange(0, 4)).wait().error is None
    eventually(hold.released.is_set)
    assert prefill.transceiver.stats().expired_leases == 1


class TestLeases:
    def test_a_hold_nobody_reads_is_released_when_its_lease_ends(self, world: Any) -> None:
        prefill = world.worker(Role.PREFILL, "p:1", lease_s=0.1)
        handle, hold = prefill.advertise([5], 4)
        assert hold.released.wait(5)
        assert prefill.transceiver.stats().expired_leases == 1
        assert prefill.transceiver.withdraw(handle) is CancelOutcome.ALREADY_COMPLETE

    def test_heartbeats_keep_a_slow_load_alive_past_the_lease(self, world: Any) -> None:
        prefill = world.worker(Role.PREFILL, "p:1", lease_s=0.3)
        decode = world.worker(Role.DECODE, "d:1", heartbeat_s=0.05)
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.DELAY, delay_s=1.0)
        handle, hold = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        assert load.wait().error is None
        assert prefill.transceiver.stats().expired_leases == 0
        assert hold.released.wait(5)

    def test_the_hard_cap_ends_what_heartbeats_would_extend_for_ever(self, world: Any) -> None:
        prefill = world.worker(Role.PREFILL, "p:1", lease_s=0.3, max_lease_s=0.5)
        decode = world.worker(Role.DECODE, "d:1", heartbeat_s=0.05)
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.DELAY, delay_s=2.0)
        handle, hold = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        assert hold.released.wait(5)
        assert "no longer holds" in load.wait().error
        assert decode.transceiver.stats().failures == {FailureClass.LEASE: 1}


class TestCancel:
    def test_unknown_and_finished(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        assert decode.transceiver.cancel_load(77) is CancelOutcome.NOT_FOUND
        handle, _ = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        load.wait()
        assert decode.transceiver.cancel_load(load.load_id) is CancelOutcome.ALREADY_COMPLETE
        assert len(load.results) == 1

    def test_in_flight_reports_when_the_bytes_have_stopped(self, pair: tuple[Any, Any], eventually: Eventually) -> None:
        prefill, decode = pair
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.DELAY, delay_s=0.3)
        handle, hold = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        eventually(lambda: torch.equal(decode.blocks([3]), prefill.blocks([5])))
        assert decode.transceiver.cancel_load(load.load_id) is CancelOutcome.IN_FLIGHT
        assert not load.done.is_set()
        result = load.wait()
        assert (result.error, result.in_doubt) == ("cancelled", False)
        assert decode.transceiver.stats().failures == {FailureClass.CANCELLED: 1}
        eventually(hold.released.is_set)

    def test_before_anything_moved(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLOCK)
        first, _ = prefill.advertise([5], 4)
        second, _ = prefill.advertise([6], 4)
        blocking = decode.load(first, [3], TokenRange(0, 4))
        waiting = decode.load(second, [4], TokenRange(0, 4))
        assert decode.transceiver.cancel_load(waiting.load_id) is CancelOutcome.CANCELLED_BEFORE_ADVERTISE
        before = decode.blocks([4])
        decode.agent.unblock()
        assert waiting.wait().error == "cancelled"
        assert blocking.wait().error is None
        assert torch.equal(decode.blocks([4]), before)

    def test_withdraw(self, pair: tuple[Any, Any]) -> None:
        prefill, decode = pair
        handle, hold = prefill.advertise([5], 4)
        assert prefill.transceiver.withdraw(handle) is CancelOutcome.IN_FLIGHT
        assert hold.released.is_set()
        assert prefill.transceiver.withdraw(handle) is CancelOutcome.ALREADY_COMPLETE
        assert prefill.transceiver.withdraw(b"nonsense") is CancelOutcome.NOT_FOUND
        assert decode.transceiver.withdraw(handle) is CancelOutcome.NOT_FOUND


class TestConnect:
    def test_names_what_does_not_fit(self, world: Any) -> None:
        world.worker(Role.PREFILL, "p:1", fingerprint="other")
        decode = world.worker(Role.DECODE, "d:1")
        with pytest.raises(IncompatiblePeerError, match="model_fingerprint is"):
            decode.transceiver.connect("p:1")

    def test_unreachable(self, world: Any) -> None:
        decode = world.worker(Role.DECODE, "d:1")
        with pytest.raises(TransferError, match="nobody:1"):
            decode.transceiver.connect("nobody:1")

    def test_first_contact_that_hears_nothing_ends_in_time(self, world: Any) -> None:
        world.worker(Role.PREFILL, "p:1")
        decode = world.worker(Role.DECODE, "d:1", handshake_timeout_s=0.3)
        decode.agent.inject(Fault.BLACK_HOLE)
        with pytest.raises(TransferError):
            decode.transceiver.connect("p:1")
        assert decode.transceiver.connect("p:1").worker == "prefill-p:1"

    def test_does_not_send_its_own_key(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        prefill, decode = world.worker(Role.PREFILL, "p:1"), world.worker(Role.DECODE, "d:1")
        seen = []
        answer = prefill.transceiver.answer_handshake
        monkeypatch.setattr(prefill.transceiver, "answer_handshake", lambda rank: (seen.append(rank), answer(rank))[1])
        decode.transceiver.connect("p:1")
        assert [rank.handle_key for rank in seen] == [b""]


class TestClose:
    def test_releases_holds_ends_loads_and_refuses_new_ones(self, world: Any, eventually: Eventually) -> None:
        prefill, decode = world.worker(Role.PREFILL, "p:1"), world.worker(Role.DECODE, "d:1")
        decode.transceiver.connect("p:1")
        decode.agent.inject(Fault.BLACK_HOLE)
        handle, hold = prefill.advertise([5], 4)
        load = decode.load(handle, [3], TokenRange(0, 4))
        eventually(lambda: decode.transceiver.stats().open_loads == 1)
        decode.transceiver.close()
        result = load.wait()
        assert (result.error, result.in_doubt) == ("the transceiver was closed", False)
        assert decode.agent.land_late_writes() == 0
        prefill.transceiver.close()
        assert hold.released.is_set()
        with pytest.raises(TransferError, match="closed"):
            prefill.advertise([5], 4)
        with pytest.raises(TransferError, match="closed"):
            decode.load(handle, [3], TokenRange(0, 4))

    def test_a_callback_that_raises_harms_nobody(
        self, pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture, eventually: Eventually
    ) -> None:
        prefill, decode = pair

        def broken(_: LoadResult) -> None:
            raise RuntimeError("broken callback")

        first, _ = prefill.advertise([5], 4)
        second, _ = prefill.advertise([6], 4)
        decode.transceiver.load(first, b"d" * 32, (BlockTable((3,), ()),), TokenRange(0, 4), broken)
        assert decode.load(second, [4], TokenRange(0, 4)).wait().error is None
        eventually(lambda: decode.transceiver.stats().callback_errors == 1)  # either may end first
        assert "broken callback" in caplog.text


def test_nothing_is_polled_while_nothing_is_open(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    prefill, decode = pair
    polls = [_count_polls(worker, monkeypatch) for worker in pair]
    handle, hold = prefill.advertise([5], 4)
    eventually(lambda: polls[0]() > 3)  # a handle is out: its reader may have something to say
    assert decode.load(handle, [3], TokenRange(0, 4)).wait().error is None
    eventually(hold.released.is_set)
    threading.Event().wait(1.2)  # a target keeps helping a new peer for a while
    decode.transceiver.connect("p:1")  # a peer met before needs no help
    threading.Event().wait(0.1)
    before = [count() for count in polls]
    threading.Event().wait(0.3)
    assert [count() for count in polls] == before


def _count_polls(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the worker's agent has been asked for notifications, by whichever thread does that."""
    if isinstance(worker.transceiver, CppTransceiver):
        return lambda: worker.transceiver.engine.looks  # type: ignore[no-any-return]
    drain, asked = worker.agent.drain_notifications, [0]

    def counted() -> list[tuple[str, bytes]]:
        asked[0] += 1
        return drain()  # type: ignore[no-any-return]

    monkeypatch.setattr(worker.agent, "drain_notifications", counted)
    return lambda: asked[0]


def test_a_source_helps_the_reader_of_what_it_has_given_up(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """A read in progress may need the source's agent to end, and asks for it with every heartbeat until it has."""
    prefill, _ = pair
    polls = _count_polls(prefill, monkeypatch)
    handle, _ = prefill.advertise([5], 4)
    eventually(lambda: polls() > 0)
    assert prefill.transceiver.withdraw(handle) is CancelOutcome.IN_FLIGHT
    for _ in range(2):
        before = polls()
        eventually(lambda before=before: polls() > before + 5)  # type: ignore[misc]
        threading.Event().wait(0.7)
        before = polls()
        threading.Event().wait(0.2)
        assert polls() == before  # and then sleeps again
        assert prefill.transceiver.answer_heartbeat("d", [4711]) == [4711]


def test_different_block_sizes(world: Any) -> None:
    prefill = world.worker(Role.PREFILL, "p:1")
    decode = world.worker(Role.DECODE, "d:1", layout=replace(prefill.pool.layout, tokens_per_block=8), blocks=16)
    handle, _ = prefill.advertise([5, 9, 2], 11)
    result = decode.load(handle, [3, 7], TokenRange(1, 11)).wait()
    assert result.error is None
    assert result.nbytes == 10 * prefill.pool.layout.token_nbytes
    source = torch.cat([prefill.pool.view[block] for block in (5, 9, 2)], dim=-2)
    local = torch.cat([decode.pool.view[block] for block in (3, 7)], dim=-2)
    assert torch.equal(local[..., 1:11, :], source[..., 1:11, :])


def test_many_loads_from_many_threads(world: Any, eventually: Eventually) -> None:
    prefill, decode = world.worker(Role.PREFILL, "p:1", blocks=64), world.worker(Role.DECODE, "d:1", blocks=64)
    handles = [prefill.advertise([block], 4) for block in range(64)]
    loads: list[Any] = []

    def load(block: int) -> None:
        loads.append(decode.load(handles[block][0], [63 - block], TokenRange(0, 4)))

    threads = [threading.Thread(target=load, args=(block,)) for block in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [load.wait().error for load in loads] == [None] * 64
    assert torch.equal(decode.blocks(range(63, -1, -1)), prefill.blocks(range(64)))
    eventually(lambda: prefill.transceiver.stats().open_holds == 0)
