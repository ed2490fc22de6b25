"""What one worker's KV cache holds, told as a bounded, numbered stream of events.

The worker keeps the newest events. A reader says how far it has read; where that is too long ago, or of another life
of the worker, it gets a snapshot instead, which replaces whatever it knew. A batch that was lost on the way shows as a
gap in the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be reused from `tier`. digest names its whole prefix, scope included, and is the same in every
    worker; parent is the digest of the prefix before it (of the scope, for a first block)."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    digest: bytes
    tier: Tier


KVEvent = BlockStored | BlockRemoved


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events (after, last], in order. snapshot: they are instead everything there is after event `last`.

    stream: names one life of one worker's cache; numbers of different streams have nothing to do with each other.
    """

    stream: str
    after: int
    last: int
    events: tuple[KVEvent, ...]
    snapshot: bool = False


@dataclass(slots=True)
class KVEventReader:
    """A reader's copy of what a worker holds. Ask the worker for what comes after (`stream`, `last`), apply it."""

    stream: str = ""
    last: int = 0
    tiers: dict[bytes, set[Tier]] = field(default_factory=dict)

    def apply(self, batch: KVEventBatch) -> bool:
        """False, with nothing changed, when `batch` does not continue what was read: ask again."""
        if batch.snapshot:
            self.tiers.clear()
        elif batch.stream != self.stream or batch.after != self.last:
            return False
        self.stream, self.last = batch.stream, batch.last
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.tiers.setdefault(event.digest, set()).add(event.tier)
            else:
                held = self.tiers[event.digest]
                held.remove(event.tier)
                if not held:
                    del self.tiers[event.digest]
        return True

    def matched_blocks(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt with these digests the worker holds in any tier."""
        return next((count for count, digest in enumerate(digests) if digest not in self.tiers), len(digests))
