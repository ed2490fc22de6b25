"""What a KV cache manager counts, for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Slots of a tier, all layer groups together. kept: reusable prefixes; parked: suspended caches."""

    tier: str
    total: int
    free: int
    kept: int
    parked: int


@dataclass(slots=True)
class CacheStatistics:
    """Counted since the manager was made.

    prompt_tokens: given to `open`; reused_tokens: found of them, and restored_tokens: those of the found ones that were
    brought up from a tier below, loaded_tokens: by a connector. evicted_blocks: cached slots that made way for others;
    copied_ahead: those of them whose bytes the tier below had already, copied_at_once: had to be given then.
    refused_reservations: for want of pages. suspensions and resumptions: that succeeded. connector_failures: calls to
    it that raised. moved_shares: pieces of the pools' memory that one layer group got from another.
    """

    opened: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    loaded_tokens: int = 0
    evicted_blocks: int = 0
    copied_ahead: int = 0
    copied_at_once: int = 0
    refused_reservations: int = 0
    suspensions: int = 0
    resumptions: int = 0
    connector_failures: int = 0
    moved_shares: int = 0

    def opened_one(self, prompt_tokens: int, reused_tokens: int) -> None:
        self.opened += 1
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused_tokens
