"""An external KV store in this process, which misbehaves when it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from kvferry.kvcache import ConnectorParts, KVConnector


class Mood(Enum):
    GOOD = "good"
    RAISES = "raises"
    CUTS_SHORT = "cuts blocks short"
    FORGETS = "says it has what it does not"
    DROPS = "saves nothing"


class MemoryConnector(KVConnector):
    def __init__(self, parts: ConnectorParts | None = None) -> None:
        self.parts = parts
        self.blocks: dict[bytes, bytes] = {}
        self.mood = Mood.GOOD
        self.calls: list[str] = []
        self.closed = False

    def lookup(self, digests: Sequence[bytes]) -> int:
        self._called("lookup")
        return next((n for n, digest in enumerate(digests) if digest not in self.blocks), len(digests))

    def load(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        self._called("load")
        found = [self.blocks[digest] for digest in digests]
        if self.mood is Mood.CUTS_SHORT:
            return [block[:-1] for block in found]
        return found[: len(found) // 2] if self.mood is Mood.FORGETS else found

    def save(self, blocks: Mapping[bytes, bytes]) -> None:
        self._called("save")
        if self.mood is not Mood.DROPS:
            self.blocks.update(blocks)

    def close(self) -> None:
        self.closed = True
        self._called("close")

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if self.mood is Mood.RAISES:
            raise RuntimeError(f"{what}: out of order")
