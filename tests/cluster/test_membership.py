"""A worker stays in the pool: it reports, comes back after the router did, and meets its peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from kvferry.cluster import membership
from kvferry.cluster.membership import PoolMember
from kvferry.cluster.worker_service import PeerBook, StatusSource, WorkerIdentity
from kvferry.core import BlockCounts, CacheStatistics, RankProcess, Resolution, Role, Source, TransferError
from kvferry.proto import worker_pb2, worker_pb2_grpc

PATIENCE_S = 10.0


class FakeState:
    def __init__(self, healthy: bool = True) -> None:
        self.blocks = BlockCounts(total=8, free=7)
        self.requests = {"running": 1}
        self.cache = CacheStatistics()
        self.tiers = ()
        self.healthy = healthy
        self.reason = "" if healthy else "broken"


class FakeWorker:
    """A role's worker whose engine answers when it is let."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.healthy = True
        self.drained = False

    def add_to(self, server: grpc.aio.Server) -> None: ...
    def start(self) -> None: ...

    async def state(self) -> FakeState:
        await self.answers.wait()
        return FakeState(self.healthy)

    def drain(self) -> None:
        self.drained = True

    def close(self) -> None: ...


class FakeRouter(worker_pb2_grpc.PoolServicer):
    """Collects reports; sends the views it is given."""

    def __init__(self) -> None:
        self.reports: list[worker_pb2.WorkerReport] = []
        self.views: asyncio.Queue[worker_pb2.PoolView] = asyncio.Queue()
        self.joins = 0

    async def Join(  # noqa: N802 - the name of the RPC
        self, reports: AsyncIterator[worker_pb2.WorkerReport], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.PoolView]:
        self.joins += 1
        reading = asyncio.create_task(self._collect(reports))
        try:
            yield worker_pb2.PoolView()
            while True:
                yield await self.views.get()
        finally:
            reading.cancel()

    async def _collect(self, reports: AsyncIterator[worker_pb2.WorkerReport]) -> None:
        async for report in reports:
            self.reports.append(report)


def _source(worker: FakeWorker, peers: PeerBook) -> StatusSource:
    resolution = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "it fits")
    identity = WorkerIdentity(
        name="decode-0",
        role=Role.DECODE,
        incarnation="cafe",
        endpoint="127.0.0.1:1",
        model="tiny",
        model_fingerprint="f00d",
        kv_dtype="float32",
        kv_cache_core="python",
        max_batch=4,
        resolution=resolution,
        ranks=(RankProcess(0, 0, 0, 41), RankProcess(1, 1, 0, 42)),
    )
    return StatusSource(identity, worker, peers)


@asynccontextmanager
async def _serving(router: FakeRouter, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    worker_pb2_grpc.add_PoolServicer_to_server(router, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@asynccontextmanager
async def _member(
    port: int, worker: FakeWorker, connect: Callable[[str], None] | None = None
) -> AsyncIterator[PeerBook]:
    peers = PeerBook(set(), {})
    member = PoolMember(f"127.0.0.1:{port}", _source(worker, peers), peers, connect)
    task = asyncio.create_task(member.run())
    try:
        yield peers
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "REPORT_INTERVAL_S", 0.05)
    monkeypatch.setattr(membership, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(membership, "RETRY_MAX_S", 0.1)
    monkeypatch.setattr(membership, "PEER_RETRY_S", 0.05)


def _view(*peers: tuple[str, str]) -> worker_pb2.PoolView:
    return worker_pb2.PoolView(
        prefill=[worker_pb2.Peer(worker="p", endpoint=endpoint, incarnation=life) for endpoint, life in peers]
    )


async def test_reports_keep_coming_and_say_everything() -> None:
    router = FakeRouter()
    async with _serving(router) as port, _member(port, FakeWorker()):
        await _until(lambda: len(router.reports) >= 3)
    report = router.reports[-1]
    status = report.status
    assert (status.name, status.role, status.state, status.incarnation) == ("decode-0", "decode", "ready", "cafe")
    assert (status.blocks.total, status.blocks.free, dict(status.requests)) == (8, 7, {"running": 1})
    assert (status.resolution.runtime, status.resolution.manager) == ("PYTHON", "V2")
    assert (report.model_fingerprint, report.kv_dtype) == ("f00d", "float32")


async def test_a_router_that_comes_back_at_its_port_is_joined_again() -> None:
    first, second = FakeRouter(), FakeRouter()
    async with AsyncExitStack() as outer:
        async with _serving(first) as port:
            await outer.enter_async_context(_member(port, FakeWorker()))
            await _until(lambda: bool(first.reports))
        async with _serving(second, port):
            await _until(lambda: bool(second.reports))


async def test_peers_are_met_once_and_reported() -> None:
    router, met = FakeRouter(), []
    async with _serving(router) as port, _member(port, FakeWorker(), met.append) as peers:
        router.views.put_nowait(_view(("a:1", "x"), ("b:2", "y")))
        await _until(lambda: peers.ready == {"a:1", "b:2"})
        router.views.put_nowait(_view(("a:1", "x"), ("b:2", "y")))
        await _until(lambda: bool(router.reports) and set(router.reports[-1].peers_ready) == {"a:1", "b:2"})
    assert sorted(met) == ["a:1", "b:2"]


async def test_a_restarted_peer_is_met_again() -> None:
    router, met = FakeRouter(), []
    async with _serving(router) as port, _member(port, FakeWorker(), met.append) as peers:
        router.views.put_nowait(_view(("a:1", "first life")))
        await _until(lambda: met == ["a:1"])
        router.views.put_nowait(_view(("a:1", "second life")))
        await _until(lambda: met == ["a:1", "a:1"] and peers.ready == {"a:1"})


async def test_a_peer_that_is_gone_is_forgotten() -> None:
    router, met = FakeRouter(), []
    async with _serving(router) as port, _member(port, FakeWorker(), met.append) as peers:
        router.views.put_nowait(_view(("a:1", "x")))
        await _until(lambda: peers.ready == {"a:1"})
        router.views.put_nowait(_view())
        await _until(lambda: peers.ready == set())


async def test_a_refused_peer_is_named_with_its_reason_and_tried_again() -> None:
    router, attempts = FakeRouter(), []

    def connect(endpoint: str) -> None:
        attempts.append(endpoint)
        if len(attempts) < 3:
            raise TransferError("tokens_per_block differ")

    async with _serving(router) as port, _member(port, FakeWorker(), connect) as peers:
        router.views.put_nowait(_view(("a:1", "x")))
        await _until(lambda: any(dict(r.peer_errors) == {"a:1": "tokens_per_block differ"} for r in router.reports))
        await _until(lambda: peers.ready == {"a:1"} and not peers.errors)


async def test_a_busy_engine_does_not_hold_up_heartbeats() -> None:
    router, worker = FakeRouter(), FakeWorker()
    async with _serving(router) as port, _member(port, worker):
        await _until(lambda: bool(router.reports))
        worker.answers.clear()
        seen = len(router.reports)
        await _until(lambda: len(router.reports) >= seen + 3)
        assert router.reports[-1].status.blocks.total == 8
        worker.answers.set()


async def test_unhealthy_and_draining_are_told() -> None:
    worker, peers = FakeWorker(), PeerBook(set(), {})
    source = _source(worker, peers)
    source.drain()
    assert worker.drained
    assert (await source.status()).state == "draining"
    worker.healthy = False
    status = await source.status()
    assert (status.state, status.state_reason) == ("unhealthy", "broken")
