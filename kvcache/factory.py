"""Managers by version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.core import KVLayout, Registry
from kvferry.kvcache.base import KVCacheManager
from kvferry.kvcache.manager_v1 import ManagerV1
from kvferry.kvcache.manager_v2 import ManagerV2
from kvferry.kvcache.pool import Allocate


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
        allocate: Allocate | None,
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
    allocate: Allocate | None = None,
) -> KVCacheManager:
    """A manager whose pools take at most `nbytes` together.

    prefix_reuse False: nothing is published, `match` is always 0. debug: fresh pages are filled with NaN.
    allocate: where the pools live when a transceiver needs them in memory of its own; None: plain memory.
    Raises ConfigError: an unknown version, layouts it cannot hold, or a budget below one block per layer group.
    """
    return MANAGERS.get(version)(
        layouts, nbytes, prefix_reuse=prefix_reuse, device=device, debug=debug, allocate=allocate
    )
