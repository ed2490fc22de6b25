"""Where KV bytes live: pools, prefix reuse, managers V1 and V2 behind one interface."""

from kvferry.kvcache.base import (
    BlockHold,
    CacheLostError,
    CacheStateError,
    ForkableCache,
    KVCache,
    KVCacheManager,
    KVPool,
    OutOfBlocksError,
)
from kvferry.kvcache.connector import ConnectorBuilder, ConnectorParts, KVConnector
from kvferry.kvcache.copier import BackgroundCopier, Copier, RowCopy
from kvferry.kvcache.events import KVEventLog
from kvferry.kvcache.factory import MANAGERS, ManagerBuilder, create_manager
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.page_log import LoggedChange, PageChange, PageLog, repeat_changes

__all__ = [
    "MANAGERS",
    "BackgroundCopier",
    "BlockHold",
    "CacheLostError",
    "CacheOptions",
    "CacheStateError",
    "ConnectorBuilder",
    "ConnectorParts",
    "Copier",
    "ForkableCache",
    "KVCache",
    "KVCacheManager",
    "KVConnector",
    "KVEventLog",
    "KVPool",
    "LoggedChange",
    "ManagerBuilder",
    "OutOfBlocksError",
    "PageChange",
    "PageLog",
    "RowCopy",
    "create_manager",
    "repeat_changes",
]
