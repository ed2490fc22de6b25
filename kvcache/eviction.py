"""In which order cached slots are given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class EvictionQueue:
    """Slots that hold a published block nobody uses: lowest priority first, then least recently used.

    Whoever releases a prefix pushes its deepest block first, so a block always stands before the blocks it
    depends on and the queue never has to ask what is a leaf. All operations take constant time (the number
    of distinct priorities aside).
    """

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[int, None]] = {}
        self._priority: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, slot: int) -> bool:
        return slot in self._priority

    def __iter__(self) -> Iterator[int]:
        """In the order of eviction."""
        for priority in sorted(self._buckets):
            yield from self._buckets[priority]

    def push(self, slot: int, priority: int) -> None:
        """`slot` was just used for the last time, for now."""
        assert slot not in self._priority, f"slot {slot} is queued already"
        self._priority[slot] = priority
        self._buckets.setdefault(priority, OrderedDict())[slot] = None

    def remove(self, slot: int) -> None:
        priority = self._priority.pop(slot)
        bucket = self._buckets[priority]
        del bucket[slot]
        if not bucket:
            del self._buckets[priority]

    def oldest(self) -> int:
        """The slot to evict next; it stays in the queue."""
        return next(iter(self._buckets[min(self._buckets)]))
