"""The free slots of one pool, kept as runs so that a request's blocks end up beside each other.

Neighbouring blocks move as one copy, which is what makes transfers fast: a free list that forgets
adjacency would scatter every cache over the pool within minutes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvferry.kvcache.slot_set import SlotSet


class FreeSlots:
    """Maximal runs of free slots. Every operation costs a constant number of steps per slot or run.

    Runs are filed by the bit length of their size. A request is cut from the start of the smallest size class
    whose runs all fit it, so that large runs stay whole; within a class the run filed last goes first, which
    makes the choice a function of the history alone.
    """

    def __init__(self, num_slots: int) -> None:
        self._count = 0
        self._length: dict[int, int] = {}  # start of a run -> its length
        self._start: dict[int, int] = {}  # end of a run -> its start
        # OrderedDict, not dict: deleting from the middle of a dict leaves holes that a later scan walks over.
        self._starts = SlotSet(num_slots)
        self._classes = [OrderedDict[int, None]() for _ in range(num_slots.bit_length() + 1)]
        if num_slots:
            self._file(0, num_slots)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Every free slot, run by run. For checks; it walks them all."""
        for start, length in self._length.items():
            yield from range(start, start + length)

    def put(self, slot: int) -> None:
        """Adds a slot that is not in here."""
        start, stop = slot, slot + 1
        before = self._start.get(slot)
        if before is not None:
            self._unfile(before)
            start = before
        if stop in self._length:
            stop += self._unfile(stop)
        self._file(start, stop - start)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Removes `count` slots (at most len(self)), continuing right behind slot `after` if that is free."""
        assert 0 <= count <= self._count, f"{count} slots asked for, {self._count} are free"
        slots: list[int] = []
        if after is not None and count and after + 1 in self._length:
            self._cut(after + 1, count, slots)
        while len(slots) < count:
            self._cut(self._pick(count - len(slots)), count - len(slots), slots)
        return slots

    def remove(self, slot: int) -> None:
        """Removes a slot that is in here."""
        start = self._starts.last_up_to(slot)
        assert start is not None, f"slot {slot} is not free"
        assert slot < start + self._length[start], f"slot {slot} is not free"
        length = self._unfile(start)
        if slot > start:
            self._file(start, slot - start)
        if slot + 1 < start + length:
            self._file(slot + 1, start + length - slot - 1)

    def check_integrity(self) -> None:
        assert self._count == sum(self._length.values())
        assert {start + length: start for start, length in self._length.items()} == self._start
        assert not self._length.keys() & self._start.keys(), "two runs touch and were not joined"
        assert all(self._starts.last_up_to(stop - 1) == start for stop, start in self._start.items())
        filed = {start: size for size, starts in enumerate(self._classes) for start in starts}
        assert filed == {start: length.bit_length() for start, length in self._length.items()}

    def _pick(self, count: int) -> int:
        """Start of the run to cut from: the smallest class of which every run fits, else the longest there are."""
        fitting = (count - 1).bit_length() + 1
        for size in range(fitting, len(self._classes)):
            if self._classes[size]:
                return next(reversed(self._classes[size]))
        for size in range(min(fitting, len(self._classes)) - 1, 0, -1):
            if self._classes[size]:
                return next(reversed(self._classes[size]))
        raise AssertionError("no free run, though the count says so")

    def _cut(self, start: int, count: int, slots: list[int]) -> None:
        """Moves up to `count` slots from the start of a run to `slots`."""
        length = self._unfile(start)
        used = min(count, length)
        slots.extend(range(start, start + used))
        if used < length:
            self._file(start + used, length - used)

    def _file(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        self._starts.add(start)
        self._classes[length.bit_length()][start] = None
        self._count += length

    def _unfile(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start[start + length]
        self._starts.remove(start)
        del self._classes[length.bit_length()][start]
        self._count -= length
        return length
