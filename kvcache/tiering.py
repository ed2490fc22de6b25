"""Blocks on their way between V2's pools and the tier below."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from kvferry.core import ConfigError, KVLayout, Tier, block_digest
from kvferry.kvcache.base import CacheLostError
from kvferry.kvcache.core_v2 import CoreCache, CoreHold, CoreLedger, Evictions
from kvferry.kvcache.disk_tier import DiskTier
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.groups import GroupRule, lead_group, rules_of
from kvferry.kvcache.host_tier import HostTier
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.parked import Parked
from kvferry.kvcache.pool import Pages


class TieredBooks:
    """A core's books together with the memory they stand for, and with everybody who must know what happens to it.

    host None: what is evicted is gone. All calls that may evict, publish or unlink go through here.
    """

    def __init__(
        self,
        ledger: CoreLedger,
        pages: Pages,
        rules: Sequence[GroupRule],
        host: HostTier | None,
        events: KVEventLog | None,
    ) -> None:
        """The ledger keeps a journal where there is a host tier or an event log."""
        self.ledger = ledger
        self.pages = pages
        self.rules = tuple(rules)
        self.host = host
        self._events = events
        self._size = rules[0].tokens_per_block
        self._states = [group for group, rule in enumerate(rules) if rule.is_state]

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
                shelf.keep(blocks, self.pages.rows(group))

    def open(self, scope: bytes, tokens: array[int], priority: int, loaded: int) -> tuple[CoreCache, int]:
        """A cache that starts with the longest prefix the pools and the tiers below can serve together, and how many
        of its blocks came from below. loaded: see `CoreLedger.open`; what is late comes with the load."""
        core = self.ledger.open(scope, tokens, priority, loaded)
        published = core.published
        if self.host is not None and not core.late:
            self._restore(self.host, core, scope, tokens)
        return core, core.published - published

    def match(self, scope: bytes, tokens: array[int]) -> int:
        """Blocks of that prefix."""
        blocks = self.ledger.match(scope, tokens)
        if self.host is None:
            return blocks
        return blocks + self.host.servable(blocks, self._digests(scope, tokens)[blocks:])

    def prefetch(self, scope: bytes, tokens: array[int]) -> bool:
        """Whether nothing of that prefix is being read from disk any more; starts what has to be read."""
        if self.host is None or not self.host.has_disk:
            return True
        start = self.ledger.match(scope, tokens)
        return self.host.prefetch(start, self._digests(scope, tokens)[start:])

    def _restore(self, host: HostTier, core: CoreCache, scope: bytes, tokens: array[int]) -> None:
        """Brings the blocks behind the published prefix up again, as many as there are pages for: all or none."""
        start = core.published
        digests = self._digests(scope, tokens)[start:]
        stop = start + host.servable(start, digests)
        if stop == start or core.shortage(stop, stop, stop * self._size) is not None:
            return
        stop = start + host.stage(start, digests[: stop - start])
        if stop == start:
            return
        history = stop * self._size
        core.advance(history, history)  # a window starts where the longer prefix needs it to
        firsts = [max(start, rule.first_live_block(history)) for rule in self.rules]
        needed = [digests[first - start : stop - start] for first in firsts]
        lent = [shelf.lend(wanted) for shelf, wanted in zip(host.shelves, needed, strict=True)]
        self.grow(core, stop, stop)
        for group, (shelf, wanted, slots) in enumerate(zip(host.shelves, needed, lent, strict=True)):
            self._bring_up(core, group, firsts[group], slots, shelf.rows)
            shelf.end_loan(wanted, slots)
        self.publish(core, tokens[start * self._size : history], stop, history)
        self.snapshot(core)

    def _bring_up(self, core: CoreCache, group: int, first: int, sources: Sequence[int], rows: torch.Tensor) -> None:
        """Copies slots of `rows` to the blocks of `core` from index `first` on."""
        offset = 0 if self.rules[group].is_state else first - core.first_block(group)
        self.pages.write(group, list(core.table(group)[offset : offset + len(sources)]), rows, sources)

    def _digests(self, scope: bytes, tokens: array[int]) -> list[bytes]:
        digests = []
        for start in range(0, len(tokens) - self._size + 1, self._size):
            scope = block_digest(scope, tokens[start : start + self._size])
            digests.append(scope)
        return digests

    def suspend(self, core: CoreCache, history: int) -> Parked | None:
        """Moves the bytes of `history` tokens down and closes `core`; None, with nothing changed, for lack of room."""
        if self.host is None:
            return None
        blocks = -(-history // self._size)
        firsts, tables = [], []
        for group, rule in enumerate(self.rules):
            start = core.first_block(group)
            first = 0 if rule.is_state else max(start, rule.first_live_block(history))
            firsts.append(first)
            tables.append(list(core.table(group)[first - start : blocks - start]))
        parked = self.host.park(tables, firsts, [self.pages.rows(group) for group in range(len(self.rules))])
        if parked is not None:
            self.close(core)
        return parked

    def withhold(self, group: int, slots: Sequence[int]) -> None:
        """Keeps idle slots from everybody. A remote reader of what was in them is told by their generations."""
        self.ledger.withhold(group, slots)
        self._follow()
        if slots:
            self.pages.claim(group, slots)

    def resume(
        self,
        parked: Parked,
        core: CoreCache,
        history: int,
        tokens: array[int],
        relieve: Callable[[Sequence[int]], bool],
    ) -> tuple[int, int, int] | None:
        """Fills `core`, just opened with what the pools still hold of `tokens` (the committed ones), with the parked
        bytes; releases them. The shortage, with `core` closed and nothing else changed, when pages are lacking;
        CacheLostError, likewise, when the bytes are."""
        published, blocks = core.published, -(-history // self._size)
        core.advance(history, history)
        shortage = core.shortage(blocks, blocks, history)
        if shortage is not None and not relieve(core.needs(blocks, blocks, history)):
            self.close(core)
            return shortage
        stored = []
        firsts = [
            0 if rule.is_state else max(published, first)
            for rule, first in zip(self.rules, parked.first_blocks, strict=True)
        ]
        for group, (first, start) in enumerate(zip(firsts, parked.first_blocks, strict=True)):
            rows = parked.stored(group, first - start)
            if rows is None:
                self.close(core)
                raise CacheLostError("a suspended KV cache did not come back whole from disk: compute it again")
            stored.append(rows)
        self.grow(core, blocks, blocks)
        for group, (first, rows) in enumerate(zip(firsts, stored, strict=True)):
            self._bring_up(core, group, first, rows.slots, rows.rows)
        committed = len(tokens) // self._size
        if committed > published:
            self.publish(core, tokens[published * self._size :], committed, history)
        parked.release()
        return None

    def clear(self) -> None:
        self.ledger.clear()
        self._follow()
        if self.host is not None:
            self.host.clear()

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
        return HostTier(layouts, rules, options.host_bytes, events) if options.host_bytes else None
    if not options.host_bytes:
        raise ConfigError(
            "kv_cache.disk_bytes needs a host tier to move blocks through: set kv_cache.host_bytes too",
            field="kv_cache.host_bytes",
        )
    if options.disk_dir is None:
        raise ConfigError("kv_cache.disk_bytes needs a folder: set kv_cache.disk_dir", field="kv_cache.disk_dir")
    disk = DiskTier(options.disk_dir, layouts, options.disk_bytes, lead_group(rules), events)
    return HostTier(layouts, rules, options.host_bytes, events, disk)
