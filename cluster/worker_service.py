"""What every worker tells about itself: its status, and ``kvferry.v1.Worker`` (Describe, Drain)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvferry.cluster.kv_event_stream import event_batches
from kvferry.core import BlockCounts, CacheStatistics, RankProcess, Resolution, Role, TierCounts, cache_codec, codec
from kvferry.kvcache import KVEventLog
from kvferry.proto import admin_pb2, worker_pb2, worker_pb2_grpc

# A heartbeat must not wait for a long step: the router would take a busy worker for a lost one.
ENGINE_ANSWER_S = 0.4


class HostState(Protocol):
    """What a role's worker reports about its engine (`kvferry.engine.EngineState`)."""

    @property
    def blocks(self) -> BlockCounts: ...
    @property
    def requests(self) -> dict[str, int]: ...
    @property
    def cache(self) -> CacheStatistics: ...
    @property
    def tiers(self) -> tuple[TierCounts, ...]: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class RoleWorker(Protocol):
    """A PrefillWorker or a DecodeWorker, as the cluster sees it."""

    def add_to(self, server: grpc.aio.Server) -> None: ...
    def start(self) -> None: ...
    async def state(self) -> HostState: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What stays the same for one life of a worker."""

    name: str
    role: Role
    incarnation: str
    endpoint: str
    model: str
    model_fingerprint: str
    kv_dtype: str
    kv_cache_core: str
    max_batch: int
    resolution: Resolution
    ranks: tuple[RankProcess, ...]


@dataclass(slots=True)
class PeerBook:
    """Whom a decode worker can pull from. ready: endpoints; errors: endpoint -> why not."""

    ready: set[str]
    errors: dict[str, str]


class StatusSource:
    """Puts a worker's status together; owns whether it drains."""

    def __init__(self, identity: WorkerIdentity, worker: RoleWorker, peers: PeerBook) -> None:
        self.identity = identity
        self._worker = worker
        self._peers = peers
        self._draining = False
        self._last: HostState | None = None
        self._asked: asyncio.Task[HostState] | None = None

    def drain(self) -> None:
        """New requests are refused from now on; running ones finish."""
        self._draining = True
        self._worker.drain()

    async def status(self) -> admin_pb2.WorkerStatus:
        engine = await self._engine_state()
        identity = self.identity
        return admin_pb2.WorkerStatus(
            name=identity.name,
            role=identity.role.value,
            state=self._state(engine.healthy),
            state_reason=engine.reason,
            pid=os.getpid(),
            incarnation=identity.incarnation,
            endpoint=identity.endpoint,
            resolution=codec.resolution_to_wire(identity.resolution),
            blocks=codec.blocks_to_wire(engine.blocks),
            requests=engine.requests,
            cache=cache_codec.statistics_to_wire(engine.cache),
            tiers=[cache_codec.tier_to_wire(tier) for tier in engine.tiers],
            model=identity.model,
            kv_cache_core=identity.kv_cache_core,
            max_batch=identity.max_batch,
            peers=sorted(self._peers.ready),
            peer_errors=self._peers.errors,
            ranks=[codec.rank_process_to_wire(rank) for rank in identity.ranks],
        )

    async def report(self) -> worker_pb2.WorkerReport:
        status = await self.status()
        return worker_pb2.WorkerReport(
            status=status,
            model_fingerprint=self.identity.model_fingerprint,
            kv_dtype=self.identity.kv_dtype,
            peer_errors=self._peers.errors,
            peers_ready=sorted(self._peers.ready),
        )

    async def _engine_state(self) -> HostState:
        """The engine's answer, or its last one while it is busy; only the very first is waited for."""
        asked = self._asked
        if asked is None:
            asked = self._asked = asyncio.ensure_future(self._worker.state())
        await asyncio.wait({asked}, timeout=ENGINE_ANSWER_S if self._last else None)
        if asked.done():
            self._last = asked.result()
            if self._asked is asked:  # others may have asked and been answered at the same time
                self._asked = None
        assert self._last is not None
        return self._last

    def _state(self, healthy: bool) -> str:
        if not healthy:
            return "unhealthy"
        return "draining" if self._draining else "ready"


def add_worker_service(server: grpc.aio.Server, source: StatusSource, events: KVEventLog | None) -> None:
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(source, events), server)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    def __init__(self, source: StatusSource, events: KVEventLog | None) -> None:
        self._source = source
        self._events = events

    async def KVEvents(  # noqa: N802 - the name of the RPC
        self, request: worker_pb2.KVEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.KVEventBatch]:
        if self._events is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "this worker keeps no KV events: set kv_cache.event_capacity"
            )
        async with aclosing(event_batches(self._events, request.stream, request.after)) as batches:
            async for batch in batches:
                for message in cache_codec.events_to_wire(batch):
                    yield message

    async def Describe(  # noqa: N802 - the name of the RPC
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.WorkerStatus:
        return await self._source.status()

    async def Drain(  # noqa: N802 - the name of the RPC
        self, request: worker_pb2.WorkerDrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.WorkerStatus:
        self._source.drain()
        return await self._source.status()
