"""``kvferry.v1.Pool``: workers join here, report, and hear of their peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from kvferry.core import InvalidRequestError, Role, cache_codec, codec
from kvferry.proto import worker_pb2, worker_pb2_grpc
from kvferry.router.facts import WorkerFacts, WorkerState
from kvferry.router.failures import Context, abort, failures_answered
from kvferry.router.pool import Session, WorkerLostError, WorkerPool

logger = logging.getLogger(__name__)

# Peers hear of each other on change; this only bounds how long one wait lasts.
_VIEW_WAIT_S = 60.0


class PoolService(worker_pb2_grpc.PoolServicer):
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends all memberships, so that stopping the server does not wait for them."""
        self._closing.set()

    async def Join(  # type: ignore[override]  # noqa: N802 - the name of the RPC; a handler that writes by itself
        self, reports: AsyncIterator[worker_pb2.WorkerReport], context: Context
    ) -> None:
        """Lives as long as the worker's membership; ends with UNAVAILABLE when the router takes it for lost."""
        session: Session | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            async with failures_answered(context, "join"):
                first = await anext(aiter(reports), None)
                if first is None:
                    return
                session = self._pool.join(facts_from_wire(first))
                gone = asyncio.create_task(_happened(session.member.gone))
                tasks = [
                    asyncio.create_task(self._read(session, reports)),
                    asyncio.create_task(self._write(context)),
                    asyncio.create_task(_happened(self._closing)),
                    gone,
                ]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if gone in done and session.member.session == session.number:
                    reason = session.member.reason
                    await abort(context, WorkerLostError(f"taken for lost: {reason}; join again"), "join")
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # a broken stream fails both directions
            if session is not None:
                self._pool.leave(session, "its membership stream ended")

    async def _read(self, session: Session, reports: AsyncIterator[worker_pb2.WorkerReport]) -> None:
        async for report in reports:
            self._pool.report(session, facts_from_wire(report))

    async def _write(self, context: Context) -> None:
        """Sends the prefill workers there are, at first and whenever they change."""
        sent: worker_pb2.PoolView | None = None
        while True:
            version = self._pool.version
            peers = [
                worker_pb2.Peer(worker=facts.name, endpoint=facts.endpoint, incarnation=facts.incarnation)
                for facts in self._pool.prefill_peers()
            ]
            view = worker_pb2.PoolView(prefill=peers)
            if view != sent:
                await context.write(view)
                sent = view
            await self._pool.changed(version, _VIEW_WAIT_S)


async def _happened(event: asyncio.Event) -> None:
    await event.wait()


def facts_from_wire(report: worker_pb2.WorkerReport) -> WorkerFacts:
    """Raises InvalidRequestError for what no worker of this version sends."""
    status = report.status
    for field in ("name", "incarnation", "endpoint"):
        if not getattr(status, field):
            raise InvalidRequestError(f"a worker's report needs its {field}", field=field)
    try:
        role, state = Role(status.role), WorkerState(status.state)
    except ValueError as error:
        raise InvalidRequestError(f"report of {status.name}: {error}", field="status") from None
    if state is WorkerState.LOST:
        raise InvalidRequestError(f"report of {status.name}: a worker cannot call itself lost", field="state")
    return WorkerFacts(
        name=status.name,
        role=role,
        incarnation=status.incarnation,
        endpoint=status.endpoint,
        resolution=codec.resolution_from_wire(status.resolution),
        model_fingerprint=report.model_fingerprint,
        kv_dtype=report.kv_dtype,
        reported=state,
        reason=status.state_reason,
        model=status.model,
        pid=status.pid,
        max_batch=status.max_batch,
        kv_cache_core=status.kv_cache_core,
        blocks=codec.blocks_from_wire(status.blocks),
        requests=dict(status.requests),
        ranks=tuple(codec.rank_process_from_wire(rank) for rank in status.ranks),
        cache=cache_codec.statistics_from_wire(status.cache),
        tiers=tuple(cache_codec.tier_from_wire(tier) for tier in status.tiers),
        peers_ready=frozenset(report.peers_ready),
        peer_errors=dict(report.peer_errors),
    )
