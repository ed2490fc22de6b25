"""Copies under way: nothing counts as done before that has been noted."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
import torch
from manual_copier import ManualCopier

from kvferry.kvcache import RowCopy, flights
from kvferry.kvcache.flights import Flights


def one_row() -> list[RowCopy]:
    return [RowCopy(torch.zeros((1, 4), dtype=torch.uint8), [0], torch.ones((1, 4), dtype=torch.uint8), [0])]


def test_without_a_copier_everything_is_done_at_once() -> None:
    under_way, done = Flights(None), list[int]()
    assert not under_way.background
    copies = one_row()
    flight = under_way.start(copies, lambda: done.append(1), releases=True)
    assert copies[0].target.tolist() == [[1] * 4]
    assert (flight.landed, done, len(under_way), under_way.releasing) == (True, [1], 0, False)


def test_what_has_ended_is_noted_when_asked_for() -> None:
    copier = ManualCopier()
    under_way, done = Flights(copier), list[int]()
    first, second = (
        under_way.start(one_row(), lambda n=number: done.append(n), releases=number == 2) for number in (1, 2)
    )
    assert under_way.releasing
    copier.waiting[1].make()
    assert (done, second.landed, len(under_way)) == ([], False, 2)
    under_way.settle()
    assert (done, second.landed, len(under_way)) == ([2], True, 1)
    assert not under_way.releasing
    under_way.after(second, lambda: done.append(3))
    under_way.after(first, lambda: done.append(4))
    assert done == [2, 3]
    under_way.finish(first)
    under_way.finish(first)
    assert done == [2, 3, 1, 4]


def test_waiting_ends_with_the_first_or_after_a_while() -> None:
    copier = ManualCopier()
    under_way = Flights(copier)
    under_way.settle(10.0)  # nothing to wait for
    under_way.start(one_row(), lambda: None, releases=False)
    started = time.monotonic()
    under_way.settle(0.05)
    assert 0.05 <= time.monotonic() - started < 5
    assert len(under_way) == 1
    copier.waiting[0].make()
    under_way.settle(10.0)
    assert len(under_way) == 0


def test_what_copies_nothing_does_not_wait_for_others() -> None:
    copier = ManualCopier()
    under_way = Flights(copier)
    under_way.start(one_row(), lambda: None, releases=False)
    assert under_way.start([], lambda: None, releases=False).landed


def test_closing_ends_what_is_under_way() -> None:
    copier, done = ManualCopier(), list[int]()
    under_way = Flights(copier)
    for number in range(3):
        under_way.start(one_row(), lambda n=number: done.append(n), releases=False)
    under_way.close()
    assert (done, len(under_way), copier.closed) == ([0, 1, 2], 0, True)


def test_a_copier_that_hangs_is_an_error_and_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hung(ManualCopier):
        def submit(self, copies):  # type: ignore[no-untyped-def]
            return Future()

    monkeypatch.setattr(flights, "COPY_TIMEOUT_S", 0.01)
    under_way = Flights(Hung())
    flight = under_way.start(one_row(), lambda: None, releases=False)
    with pytest.raises(TimeoutError):
        under_way.finish(flight)
    assert not flight.landed
