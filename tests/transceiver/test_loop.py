from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.transceiver.loop import Loop


class Steps:
    """A step that counts and answers as told."""

    def __init__(self) -> None:
        self.count = 0
        self.wait_s: float | None = None
        self.ran = threading.Event()

    def __call__(self) -> float | None:
        self.count += 1
        self.ran.set()
        return self.wait_s


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def loop(steps: Steps) -> Iterator[Loop]:
    made = Loop("loop-under-test", steps)
    made.start()
    yield made
    assert made.close(5)


def test_jobs_run_in_order_on_one_thread_before_the_step(loop: Loop, steps: Steps) -> None:
    seen: list[tuple[int, str]] = []
    finished = threading.Event()
    for number in range(100):
        loop.post(lambda number=number: seen.append((number, threading.current_thread().name)))  # type: ignore[misc]
    loop.post(finished.set)
    assert finished.wait(5)
    assert seen == [(number, "loop-under-test") for number in range(100)]


def test_an_idle_loop_does_not_step(loop: Loop, steps: Steps) -> None:
    loop.wake()
    assert steps.ran.wait(5)
    count = steps.count
    time.sleep(0.1)
    assert steps.count == count


def test_a_step_runs_again_when_it_wants_to(loop: Loop, steps: Steps) -> None:
    steps.wait_s = 0.001
    loop.wake()
    deadline_s = time.monotonic() + 5
    while steps.count < 20:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_an_error_is_logged_and_the_loop_goes_on(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    finished = threading.Event()

    def broken() -> None:
        raise RuntimeError("a broken job")

    loop.post(broken)
    loop.post(finished.set)
    assert finished.wait(5)
    assert loop.errors == 1
    assert "a broken job" in caplog.text


def test_close_runs_what_was_posted_before_and_says_when_it_could_not() -> None:
    held, stuck, finished = threading.Event(), Loop("stuck", lambda: None), threading.Event()
    stuck.start()

    def hold() -> None:
        held.wait(10)

    stuck.post(hold)
    stuck.post(finished.set)
    assert stuck.close(0.05) is False
    held.set()
    assert stuck.close(5) is True
    assert finished.is_set()
