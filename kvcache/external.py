"""A connector as the cache sees it: whatever goes wrong in there is a miss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvferry.core import CacheStatistics
from kvferry.kvcache.caller import Caller
from kvferry.kvcache.connector import KVConnector

logger = logging.getLogger(__name__)

PAUSE_S = 10.0
"""How long a connector that failed is left alone: every call to it holds up the engine."""
CALL_LIMIT_S = 1.0
"""How long the engine waits for one call, and for all that a request loads."""
CLOSE_LIMIT_S = 60.0
LOADED_AT_A_TIME = 32
"""Blocks: of a store too slow for a long prefix, what came in time is used."""

T = TypeVar("T")


class ExternalStore:
    def __init__(self, connector: KVConnector, block_nbytes: int, statistics: CacheStatistics) -> None:
        self._connector = connector
        self._block_nbytes = block_nbytes
        self._statistics = statistics
        self._paused_until = 0.0
        self._caller = Caller("kv-connector")

    def lookup(self, digests: Sequence[bytes]) -> int:
        """How many of the first of `digests` are there to be loaded."""
        found = self._ask("lookup", lambda: self._connector.lookup(digests), 0) if digests else 0
        return max(0, min(found, len(digests)))

    def load(self, digests: Sequence[bytes]) -> list[bytes]:
        """The blocks of the first of `digests`, as many as are there."""
        wanted = digests[: self.lookup(digests)]
        blocks: list[bytes] = []
        started = time.monotonic()
        while len(blocks) < len(wanted) and time.monotonic() - started < CALL_LIMIT_S:
            part = wanted[len(blocks) : len(blocks) + LOADED_AT_A_TIME]
            loaded = self._load_part(part)
            blocks += loaded
            if len(loaded) < len(part):
                break
        return blocks

    def _load_part(self, digests: Sequence[bytes]) -> list[bytes]:
        nothing: list[bytes] = []
        loaded = self._ask("load", lambda: self._checked(self._connector.load(digests)), nothing)
        return loaded[: len(digests)]

    def save(self, blocks: Mapping[bytes, bytes]) -> None:
        self._ask("save", lambda: self._connector.save(blocks), None)

    def close(self) -> None:
        """Waits a minute at most."""
        try:
            if self._caller.stuck:
                raise TimeoutError("a call to it has not ended")
            self._caller.call(self._connector.close, CLOSE_LIMIT_S)
        except Exception:  # a stranger's code, and the worker is ending
            logger.exception("the KV connector did not close")
        self._caller.close()

    @property
    def paused(self) -> bool:
        return time.monotonic() < self._paused_until or self._caller.stuck

    def _checked(self, blocks: Sequence[bytes]) -> list[bytes]:
        for block in blocks:
            if len(block) != self._block_nbytes:
                raise ValueError(f"a block of {len(block)} bytes was loaded, they have {self._block_nbytes}")
        return list(blocks)

    def _ask(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        if self.paused:
            return otherwise
        try:
            return self._caller.call(call, CALL_LIMIT_S)
        except Exception as error:  # a stranger's code: nothing it does may end a request
            self._statistics.connector_failures += 1
            self._paused_until = time.monotonic() + PAUSE_S
            logger.warning("KV connector: %s failed, not asked again for %g s: %r", what, PAUSE_S, error)
            return otherwise
