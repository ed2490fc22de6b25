"""What the router knows about a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvferry.core import BlockCounts, CacheStatistics, RankProcess, Resolution, Role, TierCounts


class WorkerState(Enum):
    """As the router sees a worker. LOST is final: a worker that comes back is a new member."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    LOST = "lost"


_LIVE = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.UNHEALTHY, WorkerState.DRAINING})
WORKER_TRANSITIONS: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: _LIVE | {WorkerState.LOST},
    WorkerState.READY: _LIVE | {WorkerState.LOST},
    WorkerState.UNHEALTHY: _LIVE | {WorkerState.LOST},
    # A drained worker ends; a report sent before the order reached it must not bring it back.
    WorkerState.DRAINING: frozenset({WorkerState.DRAINING, WorkerState.LOST}),
    WorkerState.LOST: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One report of one worker.

    reported: the state it sees itself in. peers_ready: endpoints of prefill workers it made first contact with;
    peer_errors: why it cannot work with others. requests: leg state -> how many. cache, tiers: of the KV cache.
    ranks: the worker's processes.
    """

    name: str
    role: Role
    incarnation: str
    endpoint: str
    resolution: Resolution
    model_fingerprint: str
    kv_dtype: str
    reported: WorkerState = WorkerState.READY
    reason: str = ""
    model: str = ""
    pid: int = 0
    max_batch: int = 0
    kv_cache_core: str = ""
    blocks: BlockCounts = field(default_factory=BlockCounts)
    requests: Mapping[str, int] = field(default_factory=dict)
    cache: CacheStatistics = field(default_factory=CacheStatistics)
    tiers: tuple[TierCounts, ...] = ()
    ranks: tuple[RankProcess, ...] = ()
    peers_ready: frozenset[str] = frozenset()
    peer_errors: Mapping[str, str] = field(default_factory=dict)
