"""A set of slots in which the nearest one below another is found without looking at those between."""

from __future__ import annotations

_BITS = 1024
"""Of a word: two levels of words serve a million slots."""


class SlotSet:
    """One bit per slot, and on every level above one bit per word of the level below that is not zero."""

    def __init__(self, num_slots: int) -> None:
        self._levels: list[list[int]] = []
        size = num_slots
        while not self._levels or size > 1:
            size = -(-size // _BITS)
            self._levels.append([0] * size)

    def add(self, slot: int) -> None:
        for level in self._levels:
            word, bit = divmod(slot, _BITS)
            before = level[word]
            level[word] = before | 1 << bit
            if before:
                return
            slot = word

    def remove(self, slot: int) -> None:
        """`slot` must be in here."""
        for level in self._levels:
            word, bit = divmod(slot, _BITS)
            level[word] &= ~(1 << bit)
            if level[word]:
                return
            slot = word

    def last_up_to(self, slot: int) -> int | None:
        """The highest slot in here that is not above `slot`."""
        for depth, level in enumerate(self._levels):
            if slot < 0:
                return None
            word, bit = divmod(slot, _BITS)
            below = level[word] & ((2 << bit) - 1)
            if below:
                found = word * _BITS + below.bit_length() - 1
                for lower in reversed(self._levels[:depth]):
                    found = found * _BITS + lower[found].bit_length() - 1
                return found
            slot = word - 1
        return None
