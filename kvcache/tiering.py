"""Blocks on their way between V2's pools and the tier below."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from kvferry.core import ConfigError, KVLayout, Tier, block_digest
from kvferry.kvcache.copier import RowCopy
from kvferry.kvcache.core_v2 import CoreCache, CoreHold, CoreLedger, Evictions
from kvferry.kvcache.disk_tier import DiskTier
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.flights import Flight, Flights
from kvferry.kvcache.groups import GroupRule, lead_group, rules_of
from kvferry.kvcache.host_tier import HostTier
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.pool import Pages
from kvferry.kvcache.write_ahead import WriteAhead


class Lift:
    """A prefix of `digests` on its way up."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = frozenset(digests)
        self.flight: Flight | None = None


class TieredBooks:
    """A core's books together with the memory they stand for, and with everybody who must know what happens to it.

    host None: what is evicted is gone. All calls that may evict, publish or unlink go through here.

    A prefix that is being lifted belongs to a cache of its own until it is published, and a copy of a block that is
    written ahead is void when its slot is given away. So what the ledger decides never depends on how far a copy is.
    restored_blocks: brought up, ever. copied_at_once, copied_ahead: evicted slots whose bytes had to be copied then, or
    had been before.
    """

    def __init__(
        self,
        ledger: CoreLedger,
        pages: Pages,
        rules: Sequence[GroupRule],
        host: HostTier | None,
        events: KVEventLog | None,
        flights: Flights,
    ) -> None:
        """The ledger keeps a journal where there is a host tier or an event log. flights: owned from here on."""
        self.ledger = ledger
        self.pages = pages
        self.rules = tuple(rules)
        self.host = host
        self._events = events
        self._size = rules[0].tokens_per_block
        self._states = [group for group, rule in enumerate(rules) if rule.is_state]
        self.flights = flights
        self._ahead = WriteAhead(ledger, pages, host, flights) if host is not None and flights.background else None
        self._lifts: list[Lift] = []
        self._hashed: tuple[bytes, array[int], list[bytes]] = (b"", array("I"), [])
        self._clears = 0
        self.restored_blocks = 0
        self.copied_at_once = 0
        self.copied_ahead = 0

    def grow(self, core: CoreCache, blocks: int, near: int) -> None:
        """Gets the missing slots of `core` (in windows up to block `near`) and makes them its own; what had to be
        evicted goes down a tier first."""
        snapshots = {group: list(core.table(group)) for group in self._states}
        taken = core.grow(blocks, near)
        self._follow()
        for group, slots in enumerate(taken):
            if slots:
                self.pages.claim(group, slots)
        for group, snapshot in snapshots.items():
            for slot in taken[group]:
                if snapshot:
                    self.pages.copy(group, snapshot[0], slot)
                else:  # a sequence starts from a state of zeros
                    self.pages.zero(group, slot)

    def snapshot(self, core: CoreCache) -> bool:
        """Publishes the state after the last published block, the newest there is; False where there is no room."""
        copies = core.snapshot()
        self._copy(copies)
        return bool(copies)

    def begin_block(self, core: CoreCache, tokens: array[int], least: int) -> int:
        """Gives `core` one more block, a copy of the published one that begins with most of `tokens`, at least `least`;
        how many of them it holds, 0 where it got none."""
        shared, copies = core.begin_block(tokens, least)
        self._copy(copies)
        return shared

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """(group, slot, fresh slot) each."""
        self._follow()
        for group, source, slot in copies:
            self.pages.claim(group, [slot])
            self.pages.copy(group, source, slot)

    def publish(self, core: CoreCache, tokens: array[int], blocks: int, history: int) -> None:
        """Publishes the blocks below index `blocks`; `tokens` are those of the unpublished ones among them."""
        core.publish(tokens, blocks, history)
        self._follow(tokens)

    def close(self, core: CoreCache) -> None:
        core.close()
        self._follow()

    def quarantine(self, core: CoreCache) -> CoreHold:
        hold = core.quarantine()
        self._follow()
        return hold

    def _follow(self, tokens: Sequence[int] = ()) -> None:
        """Does with the journal what the tier below and the readers of events need. tokens: of the blocks just
        published; those that are new are the last of them, since nothing can hang on a new block yet."""
        if self.host is None and self._events is None:
            return
        links, evictions = self.ledger.drain()
        if self.host is not None and evictions:
            self._offload(self.host, evictions)
        if self._events is not None:
            at = len(tokens) - self._size * sum(parent is not None for _, parent in links)
            for digest, parent in links:
                if parent is None:
                    self._events.removed(digest, Tier.DEVICE)
                else:
                    self._events.stored(digest, parent, tokens[at : at + self._size])
                    at += self._size

    def _offload(self, host: HostTier, evictions: Evictions) -> None:
        for group, shelf in enumerate(host.shelves):
            blocks = {digest: slot for digest, which, slot in evictions if which == group}
            if blocks:
                here = sum(shelf.in_memory(digest) for digest in blocks)
                self.copied_ahead += here
                self.copied_at_once += shelf.keep(blocks, self.pages.rows(group))

    def poll(self, wait_s: float) -> bool:
        """Takes note of the copies that have ended, waiting up to `wait_s` for one, and starts those that are due ahead
        of need. Whether any was or is under way."""
        busy = bool(self.flights)
        self.flights.settle(wait_s)
        if self._ahead is not None:
            self._ahead.start()
        return busy or bool(self.flights)

    def open(self, scope: bytes, tokens: array[int], priority: int, loaded: int) -> CoreCache:
        """A cache that starts with the longest prefix the pools and the tiers below can serve together. loaded: see
        `CoreLedger.open`; what is late comes with the load. Waits for what is not in the pools yet."""
        if self._lifts:
            wanted = set(self._digests(scope, tokens))
            for lift in [lift for lift in self._lifts if not wanted.isdisjoint(lift.digests)]:
                assert lift.flight is not None
                self.flights.finish(lift.flight)
        core = self.ledger.open(scope, tokens, priority, loaded)
        if self.host is not None and not core.late:
            restored = self._bring_prefix(self.host, core, scope, tokens)
            if restored is not None:
                copies, finish = restored
                for copy in copies:
                    copy.make()
                finish()
        return core

    def match(self, scope: bytes, tokens: array[int]) -> int:
        """Blocks of that prefix."""
        blocks = self.ledger.match(scope, tokens)
        if self.host is None:
            return blocks
        return blocks + self.host.servable(blocks, self._digests(scope, tokens)[blocks:])

    def prefetch(self, scope: bytes, tokens: array[int]) -> bool:
        """Whether nothing of that prefix is on its way up from a tier below any more; starts what has to be moved."""
        host = self.host
        if host is None or not (host.has_disk or self.flights.background):
            return True
        start = self.ledger.match(scope, tokens)
        digests = self._digests(scope, tokens)[start:]
        if any(not lift.digests.isdisjoint(digests) for lift in self._lifts):
            return False
        if not host.prefetch(start, digests):
            return False
        return not (self.flights.background and self._lift(host, scope, tokens))

    def _lift(self, host: HostTier, scope: bytes, tokens: array[int]) -> bool:
        """Starts bringing up to the pools what `open` would have to; whether there was anything, and room for it."""
        core = self.ledger.open(scope, tokens, 0, 0)
        start = core.published
        restored = self._bring_prefix(host, core, scope, tokens)
        if restored is None:
            self.close(core)
            return False
        copies, finish = restored
        lift = Lift(self._digests(scope, tokens)[start:])
        self._lifts.append(lift)

        def landed() -> None:
            self._lifts.remove(lift)
            finish()
            self.close(core)

        lift.flight = self.flights.start(copies, landed, releases=True)
        return True

    def _bring_prefix(
        self, host: HostTier, core: CoreCache, scope: bytes, tokens: array[int]
    ) -> tuple[list[RowCopy], Callable[[], None]] | None:
        """Gives `core` pages for the blocks below that follow its published prefix, as many as there are pages for: all
        or none. What is to be copied there, and what publishes it then."""
        start = core.published
        digests = self._digests(scope, tokens)[start:]
        stop = start + host.servable(start, digests)
        if stop == start or core.shortage(stop, stop, stop * self._size) is not None:
            return None
        stop = start + host.stage(start, digests[: stop - start])
        if stop == start:
            return None
        history = stop * self._size
        core.advance(history, history)  # a window starts where the longer prefix needs it to
        firsts = [max(start, rule.first_live_block(history)) for rule in self.rules]
        needed = [digests[first - start : stop - start] for first in firsts]
        lent = [shelf.lend(wanted) for shelf, wanted in zip(host.shelves, needed, strict=True)]
        self.grow(core, stop, stop)
        cleared = self._clears

        def finish() -> None:
            for shelf, wanted, slots in zip(host.shelves, needed, lent, strict=True):
                shelf.end_loan(wanted, slots)
            if cleared == self._clears:
                self.publish(core, tokens[start * self._size : history], stop, history)
                self.snapshot(core)
                self.restored_blocks += stop - start

        return [
            self.rise(core, group, firsts[group], slots, shelf.rows)
            for group, (shelf, slots) in enumerate(zip(host.shelves, lent, strict=True))
        ], finish

    def rise(self, core: CoreCache, group: int, first: int, sources: Sequence[int], rows: torch.Tensor) -> RowCopy:
        """The copy of slots of `rows` to the blocks of `core` from index `first` on."""
        offset = 0 if self.rules[group].is_state else first - core.first_block(group)
        slots = list(core.table(group)[offset : offset + len(sources)])
        return RowCopy(self.pages.rows(group), slots, rows, sources)

    def _digests(self, scope: bytes, tokens: array[int]) -> list[bytes]:
        """Of the whole blocks of `tokens`. Those last asked for are kept: a waiting request asks before every step."""
        if (scope, tokens) != self._hashed[:2]:
            digests, parent = [], scope
            for start in range(0, len(tokens) - self._size + 1, self._size):
                parent = block_digest(parent, tokens[start : start + self._size])
                digests.append(parent)
            self._hashed = (scope, tokens, digests)
        return self._hashed[2]

    def withhold(self, group: int, slots: Sequence[int]) -> None:
        """Keeps idle slots from everybody. A remote reader of what was in them is told by their generations."""
        self.ledger.withhold(group, slots)
        self._follow()
        if slots:
            self.pages.claim(group, slots)

    def clear(self) -> None:
        """What is on its way up is not published when it arrives; what is on its way down is forgotten there."""
        self._clears += 1
        self.ledger.clear()
        self._follow()
        if self.host is not None:
            self.host.clear()

    def end(self) -> None:
        """Waits for the copies under way; nothing else is called afterwards."""
        self.flights.close()
        if self.host is not None:
            self.host.close()

    def check_integrity(self) -> None:
        self.ledger.check_integrity()
        if self.host is not None:
            self.host.check_integrity()


def build_tiers(
    layouts: Sequence[KVLayout], tokens_per_block: int, options: CacheOptions, events: KVEventLog | None
) -> HostTier | None:
    """The tiers below the pools. Raises ConfigError naming the setting that does not fit."""
    rules = rules_of(layouts, tokens_per_block)
    if not options.disk_bytes:
        if not options.host_bytes:
            return None
        return HostTier(layouts, rules, options.host_bytes, events, None, options.typical_tokens, options.device)
    if not options.host_bytes:
        raise ConfigError(
            "kv_cache.disk_bytes needs a host tier to move blocks through: set kv_cache.host_bytes too",
            field="kv_cache.host_bytes",
        )
    if options.disk_dir is None:
        raise ConfigError("kv_cache.disk_bytes needs a folder: set kv_cache.disk_dir", field="kv_cache.disk_dir")
    disk = DiskTier(options.disk_dir, layouts, options.disk_bytes, lead_group(rules), events)
    return HostTier(layouts, rules, options.host_bytes, events, disk, options.typical_tokens, options.device)
