"""How a manager is to be built, apart from what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.kvcache.connector import KVConnector
from kvferry.kvcache.copier import Copier
from kvferry.kvcache.page_log import PageLog
from kvferry.kvcache.pool import Allocate


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """prefix_reuse False: nothing is published, `match` is always 0. debug: fresh pages are filled with NaN, and pages
    of canaries around the pools show what was written beyond them to `check_integrity`.

    core: `cpp` or `python`, which implementation keeps the books of V2; V1 has one only. host_bytes: size of the
    host tier below the pools, 0 for none. disk_bytes, disk_dir: size and folder of the disk tier below that, 0 for
    none; the folder must belong to this worker and this model. event_capacity: how many KV events are kept for
    readers, 0 for none. connector: of an external store, the manager's own from here on; V1 only. allocate: where the
    pools live when a transceiver needs them in memory of its own; None: plain memory of `device`. page_log: where
    changes of pages are noted for the worker's other ranks, if it has any. typical_tokens: how long a typical request
    is, by which states get their memory, and layer groups with windows less of V2's, in shares that change hands while
    serving; None: every group gets the same number of blocks, and states a slot for every 16. step_tokens: most tokens
    computed in a step. copier: moves bytes between V2's pools and the host tier, the manager's own from here on; None:
    whoever calls does.
    """

    prefix_reuse: bool = True
    device: str = "cpu"
    debug: bool = False
    core: str = "cpp"
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: Path | None = None
    event_capacity: int = 0
    connector: KVConnector | None = None
    allocate: Allocate | None = None
    page_log: PageLog | None = None
    typical_tokens: int | None = None
    step_tokens: int = 0
    copier: Copier | None = None
