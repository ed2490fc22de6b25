"""Copies of whole slots between tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def copy_slots(target: torch.Tensor, to: Sequence[int], source: torch.Tensor, sources: Sequence[int]) -> None:
    """Row sources[i] of `source` becomes row to[i] of `target`; uint8 [slots, slot_nbytes], of any devices.

    In stretches of neighbours, each one plain copy: indexing by a list moves byte by byte, at a twentieth of the speed.
    """
    for first, other, count in stretches(to, sources):
        target[first : first + count].copy_(source[other : other + count])


def stretches(to: Sequence[int], sources: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(target row, source row, rows) of each stretch in which both rise by one."""
    start = 0
    for index in range(1, len(to) + 1):
        if index == len(to) or to[index] != to[index - 1] + 1 or sources[index] != sources[index - 1] + 1:
            yield to[start], sources[start], index - start
            start = index
