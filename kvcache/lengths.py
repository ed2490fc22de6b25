"""The three lengths of a cache and the rules they obey, the same for every manager."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from kvferry.kvcache.base import CacheStateError, KVCache


class TrackedCache(KVCache):
    """Checks every call against ``committed <= history <= capacity`` and the cache's life; subclasses move blocks.

    A decode step calls `reserve`, `advance` and `commit` for each of its sequences: without a new block to
    find they cost a comparison or two.
    """

    def __init__(self, tokens_per_block: int, reused: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._reused = reused
        self._committed = reused
        self._history = reused
        self._capacity = reused
        self._closed = False

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def history(self) -> int:
        return self._history

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def reused(self) -> int:
        return self._reused

    def reserve(self, capacity: int) -> None:
        self._check_open()
        if capacity < self._history:
            raise CacheStateError(f"reserve({capacity}): history is {self._history} tokens already")
        if capacity > self._capacity:
            self._grow(capacity)
            self._capacity = capacity

    def advance(self, history: int) -> None:
        self._check_open()
        if not self._history <= history <= self._capacity:
            raise CacheStateError(
                f"advance({history}): outside [history, capacity] = [{self._history}, {self._capacity}]"
            )
        before, self._history = self._history, history
        self._advanced(before)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._check_open()
        blocks = self._history // self._tokens_per_block
        full = blocks * self._tokens_per_block
        if len(token_ids) < full:
            raise CacheStateError(f"commit: {len(token_ids)} token ids for {full} tokens in full blocks")
        if full > self._committed:
            self._committed = self._publish(token_ids, blocks)

    def close(self) -> None:
        self._check_open()
        self._closed = True
        self._give_back()

    def _check_open(self) -> None:
        if self._closed:
            raise CacheStateError("the cache is closed")

    @abstractmethod
    def _grow(self, capacity: int) -> None:
        """Gets blocks for `capacity` tokens, or raises OutOfBlocksError with nothing changed."""

    @abstractmethod
    def _advanced(self, before: int) -> None:
        """History rose from `before`: lets go of what no later token needs."""

    @abstractmethod
    def _publish(self, token_ids: Sequence[int], blocks: int) -> int:
        """Publishes the blocks below index `blocks`; returns how many tokens are committed now."""

    @abstractmethod
    def _give_back(self) -> None:
        """Drops every block, deepest first."""
