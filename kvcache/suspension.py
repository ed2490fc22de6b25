"""A cache's way down to a tier below, when it is suspended, and up again."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvferry.kvcache.base import CacheLostError
from kvferry.kvcache.core_v2 import CoreCache
from kvferry.kvcache.flights import Flight
from kvferry.kvcache.parked import Parked
from kvferry.kvcache.tiering import TieredBooks

Shortage = tuple[int, int, int]
"""(group, slots needed, slots available)."""


class Suspended:
    """The bytes of a suspended cache, `parked` below. Its pages come free when these have been copied there, and it has
    new ones from `rise` on."""

    def __init__(self, books: TieredBooks, parked: Parked, down: Flight) -> None:
        self.parked = parked
        self._books = books
        self._down = down
        self._core: CoreCache | None = None
        self._up: Flight | None = None

    @property
    def first_blocks(self) -> Sequence[int]:
        return self.parked.first_blocks

    @property
    def rising(self) -> bool:
        """Whether it has its new pages."""
        return self._core is not None

    def prepare(self) -> bool:
        """Starts bringing into host memory what is not there; whether it is."""
        return self._down.landed and self.parked.prepare()

    @property
    def risen(self) -> bool:
        return self._up is not None and self._up.landed

    def rise(self, core: CoreCache, history: int, relieve: Callable[[Sequence[int]], bool]) -> Shortage | None:
        """Starts copying the bytes of `history` tokens to `core`, just opened with what the pools still hold of them.
        The shortage, with `core` closed and nothing else changed, when pages are lacking; CacheLostError, likewise,
        when the bytes are."""
        books = self._books
        size = books.rules[0].tokens_per_block
        published, blocks = core.published, -(-history // size)
        core.advance(history, history)
        shortage = core.shortage(blocks, blocks, history)
        if shortage is not None and not relieve(core.needs(blocks, blocks, history)):
            books.close(core)
            return shortage
        books.flights.finish(self._down)
        firsts, stored = [], []
        for group, (rule, start) in enumerate(zip(books.rules, self.parked.first_blocks, strict=True)):
            first = 0 if rule.is_state else max(published, start)
            rows = self.parked.stored(group, first - start)
            if rows is None:
                books.close(core)
                raise CacheLostError("a suspended KV cache did not come back whole from disk: compute it again")
            firsts.append(first)
            stored.append(rows)
        books.grow(core, blocks, blocks)
        copies = [
            books.rise(core, group, first, rows.slots, rows.rows)
            for group, (first, rows) in enumerate(zip(firsts, stored, strict=True))
        ]
        self._core = core
        self._up = books.flights.start(copies, lambda: None, releases=False)
        return None

    def end(self, tokens: array[int], history: int) -> CoreCache:
        """The cache it has become; `tokens` are the committed ones. Waits for the copies; forgets what was parked."""
        books, core = self._books, self._core
        assert core is not None
        assert self._up is not None
        books.flights.finish(self._up)
        size = books.rules[0].tokens_per_block
        published, committed = core.published, len(tokens) // size
        if committed > published:
            books.publish(core, tokens[published * size :], committed, history)
        self.parked.release()
        return core

    def drop(self) -> None:
        """It is not wanted any more. A slot that a copy under way writes is given back when that has ended."""
        flights = self._books.flights
        flights.after(self._down, self.parked.release)
        if self._core is not None:
            assert self._up is not None
            core = self._core
            self._up.releases = True
            flights.after(self._up, lambda: self._books.close(core))


def suspend(books: TieredBooks, core: CoreCache, history: int) -> Suspended | None:
    """Starts moving the bytes of `history` tokens down and closes `core`; None, with nothing changed, for lack of room.
    Its pages are nobody's until they have been copied."""
    if books.host is None:
        return None
    blocks = -(-history // books.rules[0].tokens_per_block)
    firsts, tables = [], []
    for group, rule in enumerate(books.rules):
        start = core.first_block(group)
        first = 0 if rule.is_state else max(start, rule.first_live_block(history))
        firsts.append(first)
        tables.append(list(core.table(group)[first - start : blocks - start]))
    parked = books.host.park(tables, firsts, [books.pages.rows(group) for group in range(len(books.rules))])
    if parked is None:
        return None
    hold = core.pin(blocks)
    books.close(core)
    return Suspended(books, parked, books.flights.start(parked.copies, hold.release, releases=True))
