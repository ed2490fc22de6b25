"""The source's side of the bargain, message by message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvferry.core import BlockTable, InternalError, RankInfo, Role, TokenRange
from kvferry.transceiver.base import CancelOutcome
from kvferry.transceiver.protocol import Notification, NotificationKind, open_handle

BEGIN, DONE, FAILED = NotificationKind.BEGIN, NotificationKind.DONE, NotificationKind.FAILED


@pytest.fixture
def prefill(world: Any) -> Any:
    return world.worker(Role.PREFILL, "p:1")


def note_for(handle: bytes, kind: NotificationKind, tokens: TokenRange, nbytes: int) -> Notification:
    opened = open_handle(handle).handle
    return Notification(kind, opened.transfer_id, opened.nonce, nbytes, tokens)


def notify(worker: Any, note: Notification, reader: RankInfo | None = None) -> None:
    worker.transceiver._source.notified(note, reader)


def test_the_handle_says_what_is_pinned(prefill: Any) -> None:
    data, hold = prefill.advertise([5, 6], 7)
    signed = open_handle(data)
    signed.verify(prefill.transceiver.local.handle_key)
    assert signed.handle.blocks == hold.tables == (BlockTable((5, 6), (105, 106)),)
    assert signed.handle.tokens == TokenRange(0, 7)
    assert (signed.handle.incarnation, signed.handle.endpoint) == (prefill.transceiver.local.incarnation, "p:1")


@pytest.mark.parametrize("kinds", [(BEGIN, DONE), (DONE,), (BEGIN, BEGIN, DONE), (BEGIN, FAILED), (FAILED,)])
def test_ends_release_the_hold_once(prefill: Any, kinds: tuple[NotificationKind, ...]) -> None:
    handle, hold = prefill.advertise([5, 6], 7)
    nbytes = 7 * prefill.pool.layout.token_nbytes
    for kind in kinds:
        assert not hold.released.is_set()
        notify(prefill, note_for(handle, kind, TokenRange(0, 7), nbytes))
    assert hold.released.is_set()
    for kind in (BEGIN, DONE, FAILED):  # late and doubled ones
        notify(prefill, note_for(handle, kind, TokenRange(0, 7), nbytes))
    stats = prefill.transceiver.stats()
    assert (stats.stray_notifications, stats.callback_errors, stats.open_holds) == (3, 0, 0)
    assert stats.handed_off == (1 if kinds[-1] is DONE else 0)


def test_a_wrong_nonce_or_id_touches_nothing(prefill: Any) -> None:
    handle, hold = prefill.advertise([5, 6], 7)
    note = note_for(handle, DONE, TokenRange(0, 7), 7 * prefill.pool.layout.token_nbytes)
    notify(prefill, replace(note, nonce=b"\0" * 16))
    notify(prefill, replace(note, transfer_id=note.transfer_id ^ 1))
    prefill.transceiver._notified("nobody", b"garbage")
    assert not hold.released.is_set()
    assert prefill.transceiver.stats().stray_notifications == 3
    assert prefill.transceiver.answer_cancel(note.transfer_id, b"\0" * 16) is CancelOutcome.NOT_FOUND


@pytest.mark.parametrize(
    ("tokens", "nbytes_of"),
    [
        (TokenRange(0, 7), lambda token: 7 * token - 1),
        (TokenRange(0, 7), lambda token: 7 * token + 1),
        (TokenRange(3, 7), lambda token: 7 * token),
        (TokenRange(0, 8), lambda token: 8 * token),
    ],
)
def test_a_reader_that_expects_other_bytes_fails_the_transfer(
    prefill: Any, tokens: TokenRange, nbytes_of: Callable[[int], int], caplog: pytest.LogCaptureFixture
) -> None:
    handle, hold = prefill.advertise([5, 6], 7)
    notify(prefill, note_for(handle, BEGIN, tokens, nbytes_of(prefill.pool.layout.token_nbytes)))
    assert hold.released.is_set()
    assert prefill.transceiver.stats().handed_off == 0
    assert "the reader" in caplog.text
    transfer_id = open_handle(handle).handle.transfer_id
    assert prefill.transceiver.answer_heartbeat("reader", [transfer_id]) == [transfer_id]


@pytest.mark.parametrize(("share", "released"), [(0.5, False), (1.0, True)])
def test_a_reader_of_half_the_heads_takes_half_the_bytes(prefill: Any, share: float, released: bool) -> None:
    half = prefill.pool.layout.shard(1, 2)
    reader = replace(prefill.transceiver.local, layouts=(half,), tp_rank=1, tp_size=2)
    handle, hold = prefill.advertise([5, 6], 7)
    nbytes = int(7 * share * prefill.pool.layout.token_nbytes)
    notify(prefill, note_for(handle, BEGIN, TokenRange(0, 7), nbytes), reader)
    assert hold.released.is_set() == released


def test_a_suffix_is_fewer_bytes(prefill: Any) -> None:
    handle, hold = prefill.advertise([5, 6], 7)
    notify(prefill, note_for(handle, BEGIN, TokenRange(3, 7), 4 * prefill.pool.layout.token_nbytes))
    assert not hold.released.is_set()


def test_heartbeats_name_what_is_not_open(prefill: Any) -> None:
    handle, _ = prefill.advertise([5], 4)
    transfer_id = open_handle(handle).handle.transfer_id
    assert prefill.transceiver.answer_heartbeat("reader", [transfer_id, 99]) == [99]


def test_cancel_over_the_control_channel(prefill: Any) -> None:
    handle, hold = prefill.advertise([5], 4)
    opened = open_handle(handle).handle
    assert prefill.transceiver.answer_cancel(opened.transfer_id, opened.nonce) is CancelOutcome.IN_FLIGHT
    assert hold.released.is_set()
    assert prefill.transceiver.answer_cancel(opened.transfer_id, opened.nonce) is CancelOutcome.ALREADY_COMPLETE


class TestHoldsThatDoNotFit:
    def advertise(self, worker: Any, tables: tuple[BlockTable, ...], hold_type: Any, stop: int = 7) -> None:
        worker.transceiver.advertise(hold_type(tables), TokenRange(0, stop), b"d", lambda: None)

    def test_too_short(self, prefill: Any, fake_hold: Any) -> None:
        with pytest.raises(InternalError, match="the hold ends at position 8, 9 was advertised"):
            self.advertise(prefill, (BlockTable((1, 2), (1, 2)),), fake_hold, stop=9)

    def test_no_generations(self, prefill: Any, fake_hold: Any) -> None:
        with pytest.raises(InternalError, match="2 blocks, 0 generations"):
            self.advertise(prefill, (BlockTable((1, 2), ()),), fake_hold)

    def test_wrong_number_of_groups(self, prefill: Any, fake_hold: Any) -> None:
        with pytest.raises(InternalError, match="0 block tables for 1 layer groups"):
            self.advertise(prefill, (), fake_hold)
