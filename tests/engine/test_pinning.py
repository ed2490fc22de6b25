"""Where compute threads run: cores of their own, chosen from those a process may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from kvferry.engine import EngineSettings, ModelRunner
from kvferry.engine.pinning import cores_of, pin_this_thread

T = TypeVar("T")
CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="binding needs a choice of cores")


@pytest.mark.parametrize(
    ("first", "threads", "allowed", "cores"),
    [
        (0, 1, [4, 5, 6, 7], (4,)),
        (1, 2, [4, 5, 6, 7], (5, 6)),
        (3, 2, [4, 5, 6, 7], (7, 4)),
        (9, 1, [4, 5, 6, 7], (5,)),
        (0, 2, [0, 1], ()),
        (1, 3, [0, 1], ()),
    ],
)
def test_workers_take_the_cores_in_order(
    first: int, threads: int, allowed: Sequence[int], cores: tuple[int, ...]
) -> None:
    assert cores_of(first, threads, allowed) == cores


def _on_a_thread(action: Callable[[], T]) -> tuple[T, set[int]]:
    """What `action` returns on a thread of its own, and the cores that this may run on afterwards."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: (action(), os.sched_getaffinity(0))).result()


@two_cores
def test_only_the_calling_thread_is_bound() -> None:
    assert _on_a_thread(lambda: pin_this_thread(1, 1)) == ((CORES[1],), {CORES[1]})
    assert _on_a_thread(lambda: None) == (None, set(CORES))
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_nothing_is_bound_where_there_is_no_choice_or_no_wish() -> None:
    assert _on_a_thread(lambda: pin_this_thread(0, len(CORES))) == ((), set(CORES))
    assert _on_a_thread(lambda: pin_this_thread(None, 1)) == ((), set(CORES))


def _tasks() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


@two_cores
def test_the_helpers_of_a_bound_thread_are_bound_with_it(tiny_llama_dir: Path) -> None:
    """OpenMP's threads are made by the first parallel loop of the thread that computes."""
    before = torch.get_num_threads()
    try:
        runner = ModelRunner.load(tiny_llama_dir, EngineSettings(threads=1, first_core=1))
        old = _tasks()

        def compute() -> list[set[int]]:
            runner.pin()
            torch.set_num_threads(3)
            torch.ones(512, 512) @ torch.ones(512, 512)
            return [os.sched_getaffinity(task) for task in _tasks() - old]

        team, own = _on_a_thread(compute)
        assert own == {CORES[1]}
        assert team == [{CORES[1]}] * 3
    finally:
        torch.set_num_threads(before)
