"""Where KV bytes live: pools, prefix reuse, managers V1 and V2 behind one interface."""

from kvferry.kvcache.base import BlockHold, CacheStateError, KVCache, KVCacheManager, KVPool, OutOfBlocksError

__all__ = ["BlockHold", "CacheStateError", "KVCache", "KVCacheManager", "KVPool", "OutOfBlocksError"]
