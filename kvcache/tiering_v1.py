"""What lies below V1's pools: the host tier that evicted blocks go to and come back from, and a store outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvferry.core import CacheStatistics, ConfigError, KVLayout
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.external import ExternalStore
from kvferry.kvcache.groups import GroupRule, Keeps
from kvferry.kvcache.host_tier import HostTier
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.parked import Parked
from kvferry.kvcache.pool import Pages


class BelowV1:
    """Moves blocks between V1's pools and what lies below; which slots they have is the ledger's business.

    host None: what is evicted is gone. store: gets every block that is completed; None: there is no connector.
    """

    def __init__(self, pages: Pages, host: HostTier | None, store: ExternalStore | None) -> None:
        self.host = host
        self._store = store
        self._pages = pages
        self._groups = range(len(pages.pools))

    @property
    def empty(self) -> bool:
        """Nothing can ever be found here."""
        return self.host is None and self._store is None

    def completed(self, blocks: Mapping[bytes, int]) -> None:
        """Blocks (digest -> slot) were computed here and published, each after the one it hangs on."""
        if self._store is not None and blocks and not self._store.paused:
            rows = [self._pages.rows(group) for group in self._groups]
            self._store.save(
                {
                    digest: b"".join(pool[slot].cpu().numpy().tobytes() for pool in rows)
                    for digest, slot in blocks.items()
                }
            )

    def evicted(self, digest: bytes, slot: int) -> None:
        """A published block leaves the pools; its bytes are whole until the slot's next owner writes."""
        if self.host is not None:
            for group, shelf in enumerate(self.host.shelves):
                shelf.keep({digest: slot}, self._pages.rows(group))

    def servable(self, digests: Sequence[bytes]) -> int:
        """How many of the first of `digests` could be brought up."""
        count = self.host.servable(0, digests) if self.host is not None else 0
        return count + (self._store.lookup(digests[count:]) if self._store is not None else 0)

    def find(self, digests: Sequence[bytes]) -> Found:
        """Secures the first of `digests` that are here. The caller ends it with `Found.bring_up`."""
        count = self.host.stage(0, digests) if self.host is not None else 0
        loaded = self._store.load(digests[count:]) if self._store is not None else []
        return Found(self._pages, self.host, digests[:count], loaded)

    def park(self, table: Sequence[int]) -> Parked | None:
        """Copies the slots of `table`; None, with nothing changed, when there is no tier or too little room in it."""
        if self.host is None:
            return None
        rows = [self._pages.rows(group) for group in self._groups]
        parked = self.host.park([table] * len(rows), [0] * len(rows), rows)
        if parked is not None:
            for copy in parked.copies:
                copy.make()
        return parked

    def unpark(self, parked: Parked, first: int, slots: Sequence[int]) -> None:
        """Copies what was parked from block `first` on to claimed `slots`, and forgets all of it."""
        for group in self._groups:
            stored = parked.stored(group, first)
            assert stored is not None, "only what is on disk can be lost, and V1 has no disk"
            self._pages.write(group, slots, stored.rows, stored.slots)
        parked.release()

    def clear(self) -> None:
        if self.host is not None:
            self.host.clear()

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
        if self._store is not None:
            self._store.close()

    def check_integrity(self) -> None:
        if self.host is not None:
            self.host.check_integrity()


class Found:
    """Blocks below the pools that stay where they are until they have been brought up: `kept` by the host tier, then
    those `loaded` from outside."""

    def __init__(self, pages: Pages, host: HostTier | None, kept: Sequence[bytes], loaded: Sequence[bytes]) -> None:
        self.loaded = loaded
        self._pages = pages
        self._shelves = host.shelves if host is not None else []
        self._kept = kept
        self._lent = [shelf.lend(kept) for shelf in self._shelves]

    def __len__(self) -> int:
        return len(self._kept) + len(self.loaded)

    def bring_up(self, slots: Sequence[int]) -> None:
        """Copies the blocks to `slots`, one claimed slot for each."""
        for group, (shelf, lent) in enumerate(zip(self._shelves, self._lent, strict=True)):
            self._pages.write(group, slots[: len(lent)], shelf.rows, lent)
            shelf.end_loan(self._kept, lent)
        if self.loaded:
            whole = torch.frombuffer(bytearray(b"".join(self.loaded)), dtype=torch.uint8).view(len(self.loaded), -1)
            start = 0
            for group, pool in enumerate(self._pages.pools):
                rows = whole[:, start : start + pool.layout.slot_nbytes]
                start += pool.layout.slot_nbytes
                self._pages.write(group, slots[len(self._kept) :], rows, range(len(self.loaded)))


def build_below(
    layouts: Sequence[KVLayout],
    tokens_per_block: int,
    options: CacheOptions,
    pages: Pages,
    events: KVEventLog | None,
    statistics: CacheStatistics,
) -> BelowV1:
    """Raises ConfigError naming the setting that does not fit."""
    if options.disk_bytes:
        raise ConfigError(
            f"kv_cache.disk_bytes is {options.disk_bytes}, but manager V1 has no tier below host memory: set it to 0, "
            "or kv_cache.manager to V2",
            field="kv_cache.disk_bytes",
        )
    host = store = None
    if options.host_bytes:
        # Windows keep all their blocks here, so a block is worth bringing up only with its part of every group.
        rules = [GroupRule(Keeps.ALL, 0, tokens_per_block) for _ in layouts]
        host = HostTier(layouts, rules, options.host_bytes, events)
    if options.connector is not None:
        if not options.prefix_reuse:
            raise ConfigError(
                "kv_cache.connector finds and keeps prefixes, but kv_cache.prefix_reuse is off: leave one of them out",
                field="kv_cache.connector",
            )
        store = ExternalStore(options.connector, sum(layout.slot_nbytes for layout in layouts), statistics)
    return BelowV1(pages, host, store)
