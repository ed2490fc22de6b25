"""Managers by version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.core import ConfigError, KVLayout, Registry
from kvferry.kvcache.base import KVCacheManager
from kvferry.kvcache.connector import KVConnector
from kvferry.kvcache.copier import Copier
from kvferry.kvcache.hybrid_v1 import HybridManagerV1
from kvferry.kvcache.manager_v1 import ManagerV1
from kvferry.kvcache.manager_v2 import ManagerV2
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.page_log import PageLog
from kvferry.kvcache.pool import Allocate

ManagerBuilder = Callable[[Sequence[KVLayout], int, CacheOptions], KVCacheManager]
"""Builds a manager and its pools. Raises ConfigError naming the setting that does not fit."""

MANAGERS: Registry[ManagerBuilder] = Registry("KV cache manager", "kv_cache.manager")


def _v1(layouts: Sequence[KVLayout], nbytes: int, options: CacheOptions) -> KVCacheManager:
    build = HybridManagerV1 if any(layout.kind.is_state for layout in layouts) else ManagerV1
    return build(layouts, nbytes, options)


MANAGERS.register("V1", _v1)
MANAGERS.register("V2", ManagerV2)

NO_TIERS_OF_RANKS = (
    "kv_cache.host_bytes is set, but workers of several ranks have no tiers below their pools: set it to 0"
)
NO_CONNECTORS_OF_RANKS = "an external KV store is set, which workers of several ranks cannot use: leave it out"


def create_manager(
    version: str,
    layouts: Sequence[KVLayout],
    nbytes: int,
    *,
    prefix_reuse: bool = True,
    device: str = "cpu",
    debug: bool = False,
    core: str = "cpp",
    host_bytes: int = 0,
    disk_bytes: int = 0,
    disk_dir: Path | None = None,
    event_capacity: int = 0,
    connector: KVConnector | None = None,
    allocate: Allocate | None = None,
    page_log: PageLog | None = None,
    typical_tokens: int | None = None,
    step_tokens: int = 0,
    copier: Copier | None = None,
) -> KVCacheManager:
    """A manager whose pools take at most `nbytes` together; the rest is explained at `CacheOptions`.

    Raises ConfigError: an unknown version or core, layouts it cannot hold, a budget below one block per layer group, or
    tiers or stores beside the pools of several ranks.
    """
    if page_log is not None and host_bytes:
        raise ConfigError(NO_TIERS_OF_RANKS, field="kv_cache.host_bytes")
    if page_log is not None and connector is not None:
        raise ConfigError(NO_CONNECTORS_OF_RANKS, field="kv_cache.connector")
    options = CacheOptions(
        prefix_reuse,
        device,
        debug,
        core,
        host_bytes,
        disk_bytes,
        disk_dir,
        event_capacity,
        connector,
        allocate,
        page_log,
        typical_tokens,
        step_tokens,
        copier,
    )
    return MANAGERS.get(version)(layouts, nbytes, options)
