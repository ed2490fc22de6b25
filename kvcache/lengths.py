"""The three lengths of a cache and the rules they obey, the same for every manager."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum

from kvferry.core import CacheStatistics
from kvferry.kvcache.base import CacheStateError, KVCache, OutOfBlocksError


class CacheState(Enum):
    OPEN = "open"
    SUSPENDED = "suspended"
    CLOSED = "closed"


class TrackedCache(KVCache):
    """Checks every call against ``committed <= history <= capacity`` and the cache's life; subclasses move blocks.

    A decode step calls `reserve`, `advance` and `commit` for each of its sequences: without a new block to
    find they cost a comparison or two.
    """

    def __init__(self, tokens_per_block: int, reused: int, statistics: CacheStatistics) -> None:
        self._statistics = statistics
        self._tokens_per_block = tokens_per_block
        self._reused = reused
        self._committed = reused
        self._history = reused
        self._capacity = reused
        self._near = reused  # positions below it have a page in every group, windows included
        self._loaded = 0  # history will be at least this before anything is computed
        self._state = CacheState.OPEN
        self._private = False

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

    def reserve(self, capacity: int, *, loaded: int = 0, ahead: int | None = None) -> None:
        self._check_open()
        if capacity < max(self._history, loaded):
            raise CacheStateError(
                f"reserve({capacity}): history is {self._history} tokens already, {loaded} are to be loaded"
            )
        near = capacity if ahead is None else min(capacity, max(self._history, loaded) + ahead)
        if capacity > self._capacity or near > self._near:
            capacity, near = max(capacity, self._capacity), max(near, self._near)
            try:
                self._grow(capacity, near, loaded)
            except OutOfBlocksError:
                self._statistics.refused_reservations += 1
                raise
            self._capacity, self._near = capacity, near
            self._loaded = max(self._loaded, loaded)

    def advance(self, history: int) -> None:
        self._check_open()
        if not self._history <= history <= self._near:
            raise CacheStateError(f"advance({history}): outside [history, capacity] = [{self._history}, {self._near}]")
        if self._history < history < self._loaded:
            raise CacheStateError(f"advance({history}): {self._loaded} tokens were to be loaded")
        before, self._history = self._history, history
        self._advanced(before)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._check_open()
        blocks = self._history // self._tokens_per_block
        full = blocks * self._tokens_per_block
        if len(token_ids) < full:
            raise CacheStateError(f"commit: {len(token_ids)} token ids for {full} tokens in full blocks")
        late = self.lacks_windows and self._history >= self._loaded
        if (full > self._committed or late) and not self._private:
            self._committed = self._publish(token_ids, blocks)

    @property
    def lacks_windows(self) -> bool:
        return False

    def keep_private(self) -> None:
        self._check_open()
        self._private = True

    @property
    def suspended(self) -> bool:
        return self._state is CacheState.SUSPENDED

    def suspend(self) -> bool:
        self._check_open()
        self._check_loaded()
        if not self._park():
            return False
        self._state = CacheState.SUSPENDED
        self._capacity = self._near = self._history
        self._statistics.suspensions += 1
        return True

    @property
    def resuming(self) -> bool:
        return False

    def prepare_resume(self, token_ids: Sequence[int]) -> bool:
        self._check_suspended("prepare_resume", token_ids)
        return self._prepare_unpark(token_ids)

    def resume(self, token_ids: Sequence[int]) -> None:
        self._check_suspended("resume", token_ids)
        self._unpark(token_ids)
        self._state = CacheState.OPEN
        self._statistics.resumptions += 1

    def close(self) -> None:
        if self._state is CacheState.SUSPENDED:
            self._drop_parked()
        else:
            self._check_open()
            self._give_back()
        self._state = CacheState.CLOSED

    def _check_suspended(self, call: str, token_ids: Sequence[int]) -> None:
        if self._state is not CacheState.SUSPENDED:
            raise CacheStateError(f"{call}: the cache is {self._state.value}")
        if len(token_ids) < self._committed:
            raise CacheStateError(f"{call}: {len(token_ids)} token ids for {self._committed} committed tokens")

    def _check_open(self) -> None:
        if self._state is not CacheState.OPEN:
            raise CacheStateError(f"the cache is {self._state.value}")

    def _check_loaded(self) -> None:
        if self._loaded > self._history:
            raise CacheStateError(f"{self._loaded} tokens are being loaded, {self._history} are there")

    @abstractmethod
    def _grow(self, capacity: int, near: int, loaded: int) -> None:
        """Gets blocks for `capacity` tokens, in windows for [loaded, near) and what that looks back at; or raises
        OutOfBlocksError with nothing changed."""

    @abstractmethod
    def _advanced(self, before: int) -> None:
        """History rose from `before`: lets go of what no later token needs."""

    @abstractmethod
    def _publish(self, token_ids: Sequence[int], blocks: int) -> int:
        """Publishes the blocks below index `blocks`; returns how many tokens are committed now."""

    @abstractmethod
    def _give_back(self) -> None:
        """Drops every block, deepest first."""

    @abstractmethod
    def _park(self) -> bool:
        """Moves what history needs to a tier below and gives every page back, some of it perhaps later, between two
        calls; False with nothing changed."""

    @abstractmethod
    def _prepare_unpark(self, token_ids: Sequence[int]) -> bool:
        """Starts moving to the pools what `_unpark` needs, as far as there is room; whether nothing is on its way."""

    @abstractmethod
    def _unpark(self, token_ids: Sequence[int]) -> None:
        """Undoes `_park`, or raises OutOfBlocksError with nothing changed."""

    @abstractmethod
    def _drop_parked(self) -> None:
        """Forgets what `_park` moved."""
