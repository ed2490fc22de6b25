"""Copies of what eviction would come to next, made before it does: then eviction has nothing left to copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.kvcache.copier import RowCopy
from kvferry.kvcache.core_v2 import CoreLedger
from kvferry.kvcache.flights import Flights
from kvferry.kvcache.host_tier import HostTier, Shelf
from kvferry.kvcache.pool import Pages

POOL_SHARE = 8
"""One slot of so many of a pool should be free, or hold a block that the tier below has too."""
MAX_BLOCKS = 4096
"""That many slots are enough in any pool, and looked through in a millisecond."""
MAX_NBYTES = 32 << 20
"""Being copied at a time: what a request waits for at most before its own copies begin."""


@dataclass(slots=True)
class _Mark:
    """What a group's books said when its eviction order was last looked through. unfinished: not to the end."""

    evicted: int = 0
    cached: int = 0
    unfinished: bool = True


class WriteAhead:
    """A published block never changes, so a copy of it is right as long as its slot has no other owner. When eviction
    gives a slot away while it is copied, the copy is void, and the block is copied at once like one that nobody had
    begun with: decisions about slots do not depend on how far copies are."""

    def __init__(self, ledger: CoreLedger, pages: Pages, host: HostTier, flights: Flights) -> None:
        self._ledger = ledger
        self._pages = pages
        self._shelves = host.shelves
        self._flights = flights
        self._marks = [_Mark() for _ in self._shelves]
        self._nbytes = 0

    def start(self) -> None:
        """Starts the next copies, if any are due."""
        for group, shelf in enumerate(self._shelves):
            self._start_group(group, shelf)

    def _start_group(self, group: int, shelf: Shelf) -> None:
        total, available, cached, _, _ = self._ledger.counts(group)
        ahead = max(1, min(total // POOL_SHARE, shelf.num_slots // 2, MAX_BLOCKS))
        most = ahead - (available - cached)  # what is free needs no copy
        mark, evicted = self._marks[group], self._ledger.evicted
        changes = evicted - mark.evicted + abs(cached - mark.cached)
        due = mark.unfinished or changes > ahead // POOL_SHARE
        if most <= 0 or not cached or not due or self._nbytes >= MAX_NBYTES:
            return
        row_nbytes = shelf.rows.shape[1]
        blocks: list[tuple[bytes, int, int]] = []
        unfinished = False
        for digest, source in self._ledger.coldest(group, most):
            if (self._nbytes or blocks) and self._nbytes + (len(blocks) + 1) * row_nbytes > MAX_NBYTES:
                unfinished = True
                break
            slot = shelf.expect(digest)
            if slot is not None:
                blocks.append((digest, source, slot))
        self._marks[group] = _Mark(evicted, cached, unfinished)
        if blocks:
            self._copy(group, shelf, blocks)

    def _copy(self, group: int, shelf: Shelf, blocks: Sequence[tuple[bytes, int, int]]) -> None:
        copy = RowCopy(shelf.rows, [slot for _, _, slot in blocks], self._pages.rows(group), [b[1] for b in blocks])
        nbytes = copy.nbytes
        self._nbytes += nbytes

        def landed() -> None:
            self._nbytes -= nbytes
            for digest, _, slot in blocks:
                shelf.arrived(digest, slot)

        self._flights.start([copy], landed, releases=False)
