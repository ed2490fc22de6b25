"""The C++ engine by itself, over memory of this process: loads, their order, bounds, and what it does when idle."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.transceiver.native.engine import (
    BackendError,
    Engine,
    Fault,
    FaultyBackend,
    MemoryBackend,
    OpState,
    Target,
    Task,
)

BLOCK = 64


class Bench:
    """An engine whose only peer is this process: its pool, its generation words, and its mailbox."""

    def __init__(self) -> None:
        memory = MemoryBackend()
        self.faults = FaultyBackend(memory)
        self.engine = Engine(self.faults)
        self.local = np.zeros(16 * BLOCK, dtype=np.uint8)
        self.remote = np.random.default_rng(0).integers(0, 256, 16 * BLOCK, dtype=np.uint8)
        self.words = np.arange(100, 116, dtype=np.uint64)
        self.scratch = np.zeros(16, dtype=np.uint64)
        for array in (self.local, self.scratch):
            self.engine.register_memory(array.ctypes.data, array.nbytes, 5.0)
        self.mail, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mail.settimeout(5)
        regions = [(array.ctypes.data, array.nbytes, array.ctypes.data) for array in (self.remote, self.words)]
        memory.add_peer(self.engine, "far", regions, line.detach(), 5.0)

    def load(self, blocks: tuple[int, ...], expected: list[int], begin: bytes = b"begin") -> Task:
        """Remote block i of `blocks` goes to local block 0, 1, ..."""
        data = [
            [self.local.ctypes.data + BLOCK * to, self.remote.ctypes.data + BLOCK * block, BLOCK]
            for to, block in enumerate(blocks)
        ]
        generations = [
            [self.scratch.ctypes.data + 8 * to, self.words.ctypes.data + 8 * block, 8]
            for to, block in enumerate(blocks)
        ]
        return self.engine.load(
            "far",
            np.asarray(data, dtype=np.uint64),
            np.asarray(generations, dtype=np.uint64),
            self.scratch.ctypes.data,
            np.asarray(expected, dtype=np.uint64),
            begin,
            b"done",
            b"failed",
        )

    def finish(self, task: Task) -> OpState:
        deadline_s = time.monotonic() + 5
        while task.state is OpState.SUBMITTED:
            assert time.monotonic() < deadline_s
            self.engine.wait(0.1)
        return task.state

    def read_mail(self, count: int) -> list[bytes]:
        return [self.mail.recv(1024) for _ in range(count)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.faults.unblock()
    assert made.engine.close(5.0)
    made.mail.close()


def test_a_load_begins_copies_checks_and_says_done(bench: Bench) -> None:
    task = bench.load((3, 9), [103, 109])
    assert bench.finish(task) is OpState.DONE
    assert (task.stale, task.source_told, task.error) == (0, True, "")
    assert np.array_equal(bench.local[: 2 * BLOCK], np.concatenate([bench.remote[192:256], bench.remote[576:640]]))
    assert not bench.local[2 * BLOCK :].any()
    assert bench.read_mail(2) == [b"begin", b"done"]


def test_stale_words_are_counted_and_the_source_hears_failed(bench: Bench) -> None:
    task = bench.load((3, 9, 4), [103, 1, 2], begin=b"")
    assert bench.finish(task) is OpState.DONE
    assert (task.stale, task.source_told) == (2, True)
    assert bench.read_mail(1) == [b"failed"]


def test_generations_are_read_after_the_data(bench: Bench) -> None:
    bench.faults.inject(Fault.DELAY, Target.OPERATION, 0, 1, 0.3)
    task = bench.load((3,), [103])
    deadline_s = time.monotonic() + 5
    while not bench.local[:BLOCK].any():
        assert time.monotonic() < deadline_s
    bench.words[3] += 1  # the block gets a new owner while its data is on the way
    assert bench.finish(task) is OpState.DONE
    assert task.stale == 1


def test_an_error_is_in_doubt_until_the_fence(bench: Bench) -> None:
    bench.faults.inject(Fault.DROP, Target.OPERATION, 0, 1, 0.0)
    task = bench.load((3,), [103])
    assert bench.finish(task) is OpState.IN_DOUBT
    assert "fails on command" in task.error
    bench.engine.fence("far", 5.0)
    assert task.state is OpState.NOT_SUBMITTED


def test_what_is_wrong_with_a_load_is_in_its_task(bench: Bench) -> None:
    lost = bench.engine.load("nobody", *_nothing(), b"begin", b"done", b"failed")
    assert bench.finish(lost) is OpState.IN_DOUBT
    assert "nobody is not known" in lost.error
    outside = bench.load((16,), [0])
    assert bench.finish(outside) is OpState.IN_DOUBT
    assert "not registered" in outside.error
    assert not bench.local.any()


def _nothing() -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
    return np.empty((0, 3), dtype=np.uint64), np.empty((0, 3), dtype=np.uint64), 0, np.empty(0, dtype=np.uint64)


def test_a_shape_that_is_not_copies_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match=r"u64 \[copies, 3\]"):
        bench.engine.submit(False, "far", np.zeros(3, dtype=np.uint64), 1.0)


def test_waiting_for_a_blocked_thread_is_bounded_and_does_not_hold_the_interpreter(bench: Bench) -> None:
    bench.faults.inject(Fault.BLOCK, Target.OPERATION, 0, 1, 0.0)
    task = bench.load((3,), [103])
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    with pytest.raises(BackendError, match="busy"):
        bench.engine.metadata(0.3)
    stop.set()
    ticker.join()
    assert ticks > 10
    assert task.state is OpState.SUBMITTED
    bench.faults.unblock()
    assert bench.finish(task) is OpState.DONE


def test_an_idle_engine_looks_at_nothing_until_it_is_told_to(bench: Bench) -> None:
    bench.finish(bench.load((3,), [103]))
    before = bench.engine.looks
    time.sleep(0.2)
    assert bench.engine.looks == before
    bench.engine.expect(0.0, 0.0)
    deadline_s = time.monotonic() + 5
    while bench.engine.looks < before + 5:
        assert time.monotonic() < deadline_s
    bench.engine.expect(None, 0.0)
    time.sleep(0.05)  # the look it may be at
    before = bench.engine.looks
    time.sleep(0.2)
    assert bench.engine.looks == before


def test_wait_ends_on_wake_and_in_time(bench: Bench) -> None:
    started_s = time.monotonic()
    bench.engine.wait(0.05)
    assert time.monotonic() - started_s >= 0.05
    threading.Timer(0.05, bench.engine.wake).start()
    bench.engine.wait(None)


def test_close_is_bounded_and_ends_every_call(bench: Bench) -> None:
    bench.faults.inject(Fault.BLOCK, Target.OPERATION, 0, 1, 0.0)
    bench.load((3,), [103])
    assert bench.engine.close(0.1) is False
    with pytest.raises(BackendError, match="closed"):
        bench.engine.metadata(1.0)
    bench.faults.unblock()
