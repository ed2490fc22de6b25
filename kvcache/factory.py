"""Managers by version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.core import KVLayout, Registry
from kvferry.kvcache.base import KVCacheManager
from kvferry.kvcache.manager_v1 import ManagerV1
from kvferry.kvcache.manager_v2 import ManagerV2


class ManagerBuilder(Protocol):
    """Builds a manager and its pools. Raises ConfigError naming the setting that does not fit."""

    def __call__(
        self,
        layouts: Sequence[KVLayout],
        nbytes: int,
        *,
        prefix_reuse: bool,
        device: str,
        debug: bool,
        core: str,
        host_bytes: int,
    ) -> KVCacheManager: ...


MANAGERS: Registry[ManagerBuilder] = Registry("KV cache manager", "kv_cache.manager")
MANAGERS.register("V1", ManagerV1)
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
) -> KVCacheManager:
    """A manager whose pools take at most `nbytes` together.

    prefix_reuse False: nothing is published, `match` is always 0. debug: fresh pages are filled with NaN.
    core: `cpp` or `python`, which implementation keeps the books of V2; V1 has one only. host_bytes: size of the host
    tier below the pools, 0 for none.
    Raises ConfigError: an unknown version or core, layouts it cannot hold, or a budget below one block per layer group.
    """
    build = MANAGERS.get(version)
    return build(
        layouts, nbytes, prefix_reuse=prefix_reuse, device=device, debug=debug, core=core, host_bytes=host_bytes
    )
