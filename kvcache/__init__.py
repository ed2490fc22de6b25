"""Where KV bytes live: pools, prefix reuse, managers V1 and V2 behind one interface."""

from kvferry.kvcache.base import (
    BlockHold,
    CacheStateError,
    KVCache,
    KVCacheManager,
    KVPool,
    OutOfBlocksError,
    TierCounts,
)
from kvferry.kvcache.factory import MANAGERS, ManagerBuilder, create_manager

__all__ = [
    "MANAGERS",
    "BlockHold",
    "CacheStateError",
    "KVCache",
    "KVCacheManager",
    "KVPool",
    "ManagerBuilder",
    "OutOfBlocksError",
    "TierCounts",
    "create_manager",
]
