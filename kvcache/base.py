"""The interface of a KV cache manager. The engine never asks which version it has.

Lengths of a request's cache, in tokens: ``committed <= history <= capacity``.

- *capacity*: positions that have a page to be written to;
- *history*: positions whose K and V are in the pages;
- *committed*: positions whose full blocks are published for reuse by others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.core import (
    BlockCounts,
    BlockTable,
    CacheStatistics,
    KVFerryError,
    KVLayout,
    MemRegion,
    OverloadedError,
    TierCounts,
)
from kvferry.kvcache.events import KVEventLog


class OutOfBlocksError(OverloadedError):
    """A pool has too few free blocks; nothing was changed. Free some, preempt, or raise `kv_cache.bytes`."""


class CacheStateError(KVFerryError):
    """Our bug: a cache was used against its contract (after close, below its history). Nothing was changed."""


class CacheLostError(KVFerryError):
    """The bytes of a suspended cache did not come back whole from disk. Close it, and compute its tokens again."""


@dataclass(frozen=True, slots=True)
class KVPool:
    """The memory of one layer group.

    buffer: uint8, [num_blocks * layout.slot_nbytes], contiguous.
    view: the same memory typed, [block, layer, plane, head, token, dim] (token before head in TOKEN_HEAD order).
    generations: int64 [num_blocks], in host memory; a block's entry is raised before its first overwrite by a
    new owner. Both start on a page boundary. guards: in debug mode, the pages before and behind `buffer`.
    """

    layout: KVLayout
    num_blocks: int
    buffer: torch.Tensor
    view: torch.Tensor
    generations: torch.Tensor
    guards: tuple[torch.Tensor, ...] = ()

    @property
    def region(self) -> MemRegion:
        return _region(self.buffer)

    @property
    def generation_region(self) -> MemRegion:
        return _region(self.generations)

    def generations_of(self, slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.generations[list(slots)].tolist())


def _region(tensor: torch.Tensor) -> MemRegion:
    nbytes = tensor.numel() * tensor.element_size()
    return MemRegion(addr=tensor.data_ptr(), nbytes=nbytes, device=str(tensor.device))


class BlockHold(ABC):
    """Blocks kept from reuse beyond their cache's life: pinned (others read them) or quarantined (others may
    still write them). Owned by the caller; `release` gives them back, once."""

    @property
    @abstractmethod
    def tables(self) -> tuple[BlockTable, ...]:
        """One per layer group, with the generations at the time the hold was taken."""

    @abstractmethod
    def release(self) -> None:
        """Raises CacheStateError the second time."""


class KVCache(ABC):
    """One request's cache, from `KVCacheManager.open` to `close`. Not thread-safe: the engine thread owns it."""

    @property
    @abstractmethod
    def committed(self) -> int: ...

    @property
    @abstractmethod
    def history(self) -> int: ...

    @property
    @abstractmethod
    def capacity(self) -> int: ...

    @property
    @abstractmethod
    def reused(self) -> int:
        """Tokens found in the prefix cache when it was opened; all three lengths start there (but committed ends with
        the last whole block)."""

    @property
    @abstractmethod
    def lacks_windows(self) -> bool:
        """Whether it was opened to be loaded and starts with a prefix of which windows and states hold nothing: a load
        must bring what positions behind it look back to, too. Until that has been committed."""

    @abstractmethod
    def reserve(self, capacity: int, *, loaded: int = 0, ahead: int | None = None) -> None:
        """Raises capacity to at least `capacity` tokens. Atomic: OutOfBlocksError leaves everything as it was.

        loaded: history will next rise to at least this, by a transfer; a window gets no page for what is stale then.
        ahead: a window gets pages for this many tokens from there on only; ask again before each step (None: for all).
        """

    @abstractmethod
    def advance(self, history: int) -> None:
        """Positions below `history` have been written. CacheStateError when it falls or passes capacity.

        Blocks of a window that this makes stale leave at the next `commit`, which still publishes them, or at the
        next `advance`; at once where nothing is published."""

    @abstractmethod
    def commit(self, token_ids: Sequence[int]) -> None:
        """Publishes every full block of history for reuse; `token_ids` are the sequence's, from position 0.

        A block whose content is published already (by another request) is swapped for the published one.
        """

    @abstractmethod
    def keep_private(self) -> None:
        """From now on `commit` publishes nothing: a block holds less than its tokens would have put there."""

    @abstractmethod
    def snapshot(self) -> bool:
        """Publishes a copy of the state groups' live slots for reuse by others, who may then start here. All of history
        must be committed, so that it ends with a block (CacheStateError). Without a snapshot where it ends, a prefix
        of a model with states is not reusable. False where there is no room, no state group, or one there already."""

    @abstractmethod
    def block_table(self, group: int) -> Sequence[int]:
        """Slot ids of layer group `group` in token order; a view that changes with the cache. A state group has one
        slot, the live state, from the first `reserve` on; a fresh one is zero."""

    @abstractmethod
    def first_block(self, group: int) -> int:
        """Index of the first block still in the table (0, except where a window has dropped stale ones)."""

    @abstractmethod
    def pin(self) -> BlockHold:
        """Keeps the blocks of history for readers, also after `close`."""

    @abstractmethod
    def quarantine(self) -> BlockHold:
        """Closes the cache and keeps *uncommitted* blocks from everybody until the hold is released."""

    @property
    @abstractmethod
    def suspended(self) -> bool:
        """Whether it holds no page: nothing but its lengths, `resume` and `close` may be used."""

    @abstractmethod
    def suspend(self) -> bool:
        """Moves the bytes of history to a tier below and gives every page back; capacity falls to history. Not while
        tokens are being loaded (CacheStateError). Where another thread copies, pages are nobody's until they have been
        copied: see `KVCacheManager.releasing`.

        False, with nothing changed, when there is no tier or too little room in it."""

    @property
    @abstractmethod
    def resuming(self) -> bool:
        """Whether a suspended cache has got its pages already, by `prepare_resume`."""

    @abstractmethod
    def prepare_resume(self, token_ids: Sequence[int]) -> bool:
        """Of a suspended cache: starts reading on another thread what `resume` needs from disk, then, if there is room,
        gets its pages and starts copying to them; False while either is under way: ask again. `resume` does not depend
        on it: what was not moved ahead is moved then."""

    @abstractmethod
    def resume(self, token_ids: Sequence[int]) -> None:
        """Undoes `suspend`; `token_ids` are the sequence's, from position 0. Atomic: OutOfBlocksError and
        CacheLostError leave it suspended."""

    @abstractmethod
    def close(self) -> None:
        """Gives every block back; published ones stay findable until evicted. CacheStateError the second time."""


class ForkableCache(KVCache):
    """A cache that beams can branch off from; the caches of a manager that serves beams are of this kind."""

    @abstractmethod
    def fork(self) -> ForkableCache:
        """A second cache of the same sequence: same lengths, same bytes, closed by itself. Nothing is copied: all
        blocks are shared, the partly filled last one until either cache reserves more and gets its own copy.

        Capacity falls to history in both, so that whoever writes on must `reserve` first. Nothing else may be writing
        to the cache, such as a load."""


class KVCacheManager(ABC):
    """Owns the pools of one worker and hands out caches. Not thread-safe: the engine thread owns it."""

    version: str
    core: str
    """`python` or `cpp`: which implementation of the bookkeeping runs."""
    takes_snapshots: bool
    """Whether `KVCache.snapshot` can ever publish anything: there are states, and prefixes are reused."""

    @property
    @abstractmethod
    def pools(self) -> tuple[KVPool, ...]:
        """One per layer group, in the order of the layouts given."""

    @abstractmethod
    def match(self, scope: str, token_ids: Sequence[int]) -> int:
        """Longest prefix, in tokens, that every layer group could serve now. Changes nothing."""

    @abstractmethod
    def open(
        self,
        scope: str,
        token_ids: Sequence[int],
        *,
        max_reuse: int,
        priority: int = 0,
        min_partial: int = 0,
        loads: bool = False,
    ) -> KVCache:
        """A cache for a sequence beginning with `token_ids`, its longest published prefix of at most `max_reuse`
        tokens already in it (0: none). A worker that must sample passes len(token_ids) - 1.

        What it publishes or reuses is evicted after everything of lower `priority`. Where the next block shares at
        least `min_partial` tokens with a published one (0: whole blocks only), a manager that can copies that one and
        reuses these tokens too; history then ends within a block that is not committed yet.

        loads: the rest, up to `max_reuse`, will be loaded in one piece, and windows with it: where these lack blocks,
        the prefix may be as long as the other groups can serve (see `KVCache.lacks_windows`)."""

    @abstractmethod
    def prefetch(self, scope: str, token_ids: Sequence[int]) -> bool:
        """Moves what `open` would bring up from tiers below, on other threads: from disk a part at a time, then, if
        there is room, to the pools. False until nothing is under way any more: ask again. `open` does not depend on it:
        what was not moved ahead is moved then."""

    @abstractmethod
    def poll(self, wait_s: float = 0.0) -> bool:
        """Takes note of what other threads have copied, waiting up to `wait_s` for the first of what is under way, and
        starts copying down what eviction would come to next. Whether anything was or is under way. Call it between
        steps: nothing that is copied counts as done before."""

    @property
    @abstractmethod
    def releasing(self) -> bool:
        """Whether pages will come free when what is being copied now has been."""

    @abstractmethod
    def can_reserve(self, tokens: int, ahead: int | None = None) -> bool:
        """Whether a fresh cache without any reuse could `reserve(tokens, ahead=ahead)` now, evicting cached
        prefixes."""

    @abstractmethod
    def max_tokens(self) -> int:
        """The longest capacity one request could ever get, with the pools to itself."""

    @abstractmethod
    def counts(self) -> BlockCounts:
        """Of all layer groups together. Where these share one buffer, total changes with who has which part of it."""

    @abstractmethod
    def group_counts(self) -> tuple[BlockCounts, ...]:
        """One per layer group."""

    @abstractmethod
    def resize(self, nbytes: int) -> None:
        """From now on at most `nbytes` of the pools are used, evicting cached prefixes if need be. Memory is not given
        back to the system. Atomic: OutOfBlocksError when live requests use more, ConfigError beyond the pools'
        size or below one block per layer group."""

    @abstractmethod
    def statistics(self) -> CacheStatistics:
        """A copy of what was counted so far."""

    @abstractmethod
    def tier_counts(self) -> tuple[TierCounts, ...]:
        """The tiers below the pools, the nearest first; none where there are none."""

    @property
    @abstractmethod
    def events(self) -> KVEventLog | None:
        """What became reusable and what no longer is; None where no events are kept."""

    @abstractmethod
    def clear_reuse(self) -> None:
        """Forgets every published prefix that no live cache uses."""

    @abstractmethod
    def close(self) -> None:
        """Ends what works in the background; waits for its pending writes. No cache may be used afterwards."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError when a structural invariant is broken. For tests and idle moments."""
