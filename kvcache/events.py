"""The producing end of the KV event stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.core import BlockRemoved, BlockStored, KVEvent, KVEventBatch, Tier, new_incarnation


@dataclass(slots=True)
class _Known:
    parent: bytes
    token_ids: tuple[int, ...]
    tiers: list[Tier] = field(default_factory=list)


class KVEventLog:
    """The newest `capacity` events, and what all of them together say. Written by the engine thread, read by any."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._stream = new_incarnation()
        self._recent: deque[KVEvent] = deque(maxlen=capacity)
        self._last = 0
        self._known: dict[bytes, _Known] = {}
        self._watchers: set[Callable[[], None]] = set()
        self._lock = threading.Lock()

    def stored(self, digest: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """A block was published in the pools."""
        with self._lock:
            known = self._known.setdefault(digest, _Known(parent, tuple(token_ids)))
            self._store(digest, known, Tier.DEVICE)

    def copied(self, digest: bytes, tier: Tier) -> None:
        """A block can be had from `tier` too. Not told where its tokens are unknown: it was found on disk."""
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._store(digest, known, tier)

    def _store(self, digest: bytes, known: _Known, tier: Tier) -> None:
        assert tier not in known.tiers, "a block is announced twice"
        known.tiers.append(tier)
        self._append(BlockStored(digest, known.parent, known.token_ids, tier))

    def removed(self, digest: bytes, tier: Tier) -> None:
        with self._lock:
            known = self._known.get(digest)
            if known is None or tier not in known.tiers:
                return  # was never told either
            known.tiers.remove(tier)
            if not known.tiers:
                del self._known[digest]
            self._append(BlockRemoved(digest, tier))

    def _append(self, event: KVEvent) -> None:
        self._recent.append(event)
        self._last += 1
        for notify in self._watchers:
            notify()

    def watch(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Calls `notify` at every event from now on, on the engine thread; it must be quick and not call back.
        Returns what ends that."""
        with self._lock:
            self._watchers.add(notify)

        def end() -> None:
            with self._lock:
                self._watchers.discard(notify)

        return end

    def read(self, stream: str, after: int) -> KVEventBatch:
        """What a reader lacks who has read `stream` up to event `after`; ("", 0) is one who has read nothing."""
        with self._lock:
            behind = self._last - after
            if stream == self._stream and 0 <= behind <= len(self._recent):
                events = tuple(self._recent)[len(self._recent) - behind :]
                return KVEventBatch(self._stream, after, self._last, events)
            stored = tuple(
                BlockStored(digest, known.parent, known.token_ids, tier)
                for digest, known in self._known.items()
                for tier in known.tiers
            )
            return KVEventBatch(self._stream, 0, self._last, stored, snapshot=True)

    def held(self, tier: Tier) -> set[bytes]:
        """The digests said to be in `tier`."""
        with self._lock:
            return {digest for digest, known in self._known.items() if tier in known.tiers}
