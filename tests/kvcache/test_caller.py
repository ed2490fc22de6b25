"""Calls that may hang."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.kvcache.caller import Caller


def test_a_call_returns_and_raises_what_the_function_does() -> None:
    caller = Caller("test-caller")
    assert caller.call(lambda: threading.current_thread().name, 10) == "test-caller"

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        caller.call(fail, 10)
    assert not caller.stuck


def test_a_function_that_runs_into_its_own_timeout_is_not_stuck() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    caller = Caller("test-caller")
    with pytest.raises(TimeoutError, match="its own"):
        caller.call(fail, 10)
    assert not caller.stuck


def test_a_call_that_hangs_is_given_up_and_nothing_is_called_until_it_ends() -> None:
    caller, go_on = Caller("test-caller"), threading.Event()
    with pytest.raises(TimeoutError):
        caller.call(lambda: go_on.wait(60), 0.05)
    assert caller.stuck
    with pytest.raises(AssertionError, match="not ended"):
        caller.call(int, 10)
    go_on.set()
    deadline = time.monotonic() + 20
    while caller.stuck:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert caller.call(lambda: 5, 10) == 5
    caller.close()
