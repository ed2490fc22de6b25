"""Managers by version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.core import KVLayout, Registry
from kvferry.kvcache.base import KVCacheManager
from kvferry.kvcache.connector import KVConnector
from kvferry.kvcache.hybrid_v1 import HybridManagerV1
from kvferry.kvcache.manager_v1 import ManagerV1
from kvferry.kvcache.manager_v2 import ManagerV2
from kvferry.kvcache.options import CacheOptions
from kvferry.kvcache.pool import Allocate

ManagerBuilder = Callable[[Sequence[KVLayout], int, CacheOptions], KVCacheManager]
"""Builds a manager and its pools. Raises ConfigError naming the setting that does not fit."""

MANAGERS: Registry[ManagerBuilder] = Registry("KV cache manager", "kv_cache.manager")


def _v1(layouts: Sequence[KVLayout], nbytes: int, options: CacheOptions) -> KVCacheManager:
    build = HybridManagerV1 if any(layout.kind.is_state for layout in layouts) else ManagerV1
    return build(layouts, nbytes, options)


MANAGERS.register("V1", _v1)
MANAGERS.register("V2", ManagerV2)


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
) -> KVCacheManager:
    """A manager whose pools take at most `nbytes` together; the rest is explained at `CacheOptions`.

    Raises ConfigError: an unknown version or core, layouts it cannot hold, or a budget below one block per layer group.
    """
    options = CacheOptions(
        prefix_reuse, device, debug, core, host_bytes, disk_bytes, disk_dir, event_capacity, connector, allocate
    )
    return MANAGERS.get(version)(layouts, nbytes, options)
