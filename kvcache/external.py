"""A connector as the cache sees it: whatever goes wrong in there is a miss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvferry.core import CacheStatistics
from kvferry.kvcache.connector import KVConnector

logger = logging.getLogger(__name__)

PAUSE_S = 10.0
"""How long a connector that failed is left alone: every call to it holds up the engine."""

T = TypeVar("T")


class ExternalStore:
    def __init__(self, connector: KVConnector, block_nbytes: int, statistics: CacheStatistics) -> None:
        self._connector = connector
        self._block_nbytes = block_nbytes
        self._statistics = statistics
        self._paused_until = 0.0

    def lookup(self, digests: Sequence[bytes]) -> int:
        """How many of the first of `digests` are there to be loaded."""
        found = self._ask("lookup", lambda: self._connector.lookup(digests), 0) if digests else 0
        return max(0, min(found, len(digests)))

    def load(self, digests: Sequence[bytes]) -> list[bytes]:
        """The blocks of the first of `digests`, as many as are there."""
        count = self.lookup(digests)
        if not count:
            return []
        nothing: list[bytes] = []
        return self._ask("load", lambda: self._checked(self._connector.load(digests[:count])), nothing)[:count]

    def save(self, blocks: Mapping[bytes, bytes]) -> None:
        self._ask("save", lambda: self._connector.save(blocks), None)

    def close(self) -> None:
        try:
            self._connector.close()
        except Exception:  # a stranger's code, and the worker is ending
            logger.exception("the KV connector did not close")

    @property
    def paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _checked(self, blocks: Sequence[bytes]) -> list[bytes]:
        for block in blocks:
            if len(block) != self._block_nbytes:
                raise ValueError(f"a block of {len(block)} bytes was loaded, they have {self._block_nbytes}")
        return list(blocks)

    def _ask(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        if self.paused:
            return otherwise
        try:
            return call()
        except Exception as error:  # a stranger's code: nothing it does may end a request
            self._statistics.connector_failures += 1
            self._paused_until = time.monotonic() + PAUSE_S
            logger.warning("KV connector: %s failed, not asked again for %g s: %r", what, PAUSE_S, error)
            return otherwise
