"""Copies of whole slots."""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvferry.kvcache.rows import copy_rows


@pytest.mark.parametrize(
    ("to", "sources"),
    [
        ([], []),
        ([3], [0]),
        ([0, 1, 2], [4, 5, 6]),
        ([0, 1, 2, 7], [4, 5, 7, 0]),
        ([5, 4, 3], [1, 2, 3]),
        ([1, 2, 3], [5, 5, 5]),
        (range(2, 6), range(4)),
    ],
)
def test_each_row_gets_where_it_is_meant_to_go(to: list[int], sources: list[int]) -> None:
    source = torch.arange(8 * 5, dtype=torch.uint8).view(8, 5)
    target = torch.full((8, 5), 255, dtype=torch.uint8)
    copy_rows(target, to, source, sources)
    expected = [[255] * 5 for _ in range(8)]
    for row, other in zip(to, sources, strict=True):
        expected[row] = source[other].tolist()
    assert target.tolist() == expected


def test_scattered_rows_move_no_slower_than_by_index() -> None:
    """Indexing by a list is the obvious way, and far slower where rows are large."""
    nbytes, count = 64 << 10, 128
    source, target = torch.ones((count, nbytes), dtype=torch.uint8), torch.zeros((count, nbytes), dtype=torch.uint8)
    to, sources = random.Random(0).sample(range(count), count), random.Random(1).sample(range(count), count)

    def by_index() -> None:
        target[torch.tensor(to)] = source[torch.tensor(sources)]

    def spent_s(number: int) -> float:
        started = time.process_time()
        copy_rows(target, to, source, sources) if number else by_index()
        return time.process_time() - started

    assert min(spent_s(1) for _ in range(5)) < min(spent_s(0) for _ in range(5))
