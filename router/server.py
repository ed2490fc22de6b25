"""The router as one process: gRPC and HTTP front ends and the pool, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.core import ConfigError
from kvferry.proto import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, worker_pb2_grpc
from kvferry.router.admin_service import AdminService
from kvferry.router.driver import Driver
from kvferry.router.generation_service import GenerationService
from kvferry.router.http_server import HttpFrontEnd
from kvferry.router.intake import Intake
from kvferry.router.ledger import Ledger
from kvferry.router.metrics import RouterMetrics
from kvferry.router.pool import WorkerPool
from kvferry.router.pool_service import PoolService
from kvferry.router.readable import ReadableRequests
from kvferry.router.settings import RouterAddresses, RouterSettings
from kvferry.router.tokenizing import Tokenizing
from kvferry.router.worker_client import MAX_MESSAGE_NBYTES, WorkerClients
from kvferry.text import Tokenizer

logger = logging.getLogger(__name__)

_SWEEPS_PER_LOSS = 10
_STOP_GRACE_S = 1.0
_CHANGE_WAIT_S = 60.0
_PACKAGE = generation_pb2.DESCRIPTOR.package
_PUBLIC_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second router would share a taken port and steal half of its calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
)


async def serve_router(settings: RouterSettings, ready: Callable[[RouterAddresses], None]) -> None:
    """Serves until cancelled. Calls `ready` once both ports listen; raises ConfigError naming a taken one."""
    pool = WorkerPool(settings.lost_after_s)
    metrics = RouterMetrics(pool)
    ledger = Ledger(metrics)
    clients = WorkerClients()
    tokenizer = await asyncio.to_thread(Tokenizer.load, settings.model_dir)
    tokenizing = Tokenizing(tokenizer, settings.limits, settings.max_queued)
    intake = Intake(settings, tokenizing)
    driver = Driver(settings, pool, clients, ledger)
    front = HttpFrontEnd(settings.model_name, intake, driver, pool, ledger, metrics, tokenizer)
    http_socket = _listen(settings.host, settings.http_port)
    async with AsyncExitStack() as stack:
        stack.callback(tokenizing.close)
        stack.callback(http_socket.close)
        stack.push_async_callback(clients.close)
        stack.push_async_callback(driver.close)
        server = grpc.aio.server(interceptors=(ReadableRequests(_PACKAGE),), options=_SERVER_OPTIONS)
        endpoint = f"{_bracketed(settings.host)}:{_bind(server, settings.host, settings.grpc_port)}"
        stack.push_async_callback(server.stop, _STOP_GRACE_S)
        pool_service = PoolService(pool)
        stack.callback(pool_service.close)
        status = _add_services(
            server,
            GenerationService(intake, driver),
            AdminService(settings.model_name, endpoint, pool, clients, driver, ledger),
            pool_service,
        )
        await stack.enter_async_context(_running(_sweep(pool, settings.lost_after_s / _SWEEPS_PER_LOSS)))
        await stack.enter_async_context(_running(_follow(pool, driver, clients, status)))
        await server.start()
        await stack.enter_async_context(_http(front, http_socket))
        addresses = RouterAddresses(endpoint, f"{_bracketed(settings.host)}:{http_socket.getsockname()[1]}")
        logger.info("router for %s: gRPC at %s, HTTP at %s", settings.model_name, addresses.grpc, addresses.http)
        ready(addresses)
        await asyncio.get_running_loop().create_future()  # until cancelled


def _add_services(
    server: grpc.aio.Server, generation: GenerationService, admin: AdminService, pool: PoolService
) -> health.aio.HealthServicer:
    status = health.aio.HealthServicer()
    generation_pb2_grpc.add_GenerationServicer_to_server(generation, server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    worker_pb2_grpc.add_PoolServicer_to_server(pool, server)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    # The pool is no public API, so it is not listed.
    reflection.enable_server_reflection((*_PUBLIC_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return status


async def _sweep(pool: WorkerPool, interval_s: float) -> None:
    while True:
        pool.sweep()
        await asyncio.sleep(interval_s)


async def _follow(pool: WorkerPool, driver: Driver, clients: WorkerClients, status: health.aio.HealthServicer) -> None:
    """Does what follows from workers coming and going."""
    while True:
        version = pool.version
        serving = health_pb2.HealthCheckResponse.SERVING
        state = serving if pool.topology.usable else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *_PUBLIC_SERVICES):
            # Admin answers as long as the process lives.
            await status.set(service, serving if service == _PUBLIC_SERVICES[1] else state)
        driver.admit()
        await clients.forget({member.facts.incarnation for member in pool.members() if not member.lifecycle.ended})
        await pool.changed(version, _CHANGE_WAIT_S)


# -- ports and tasks ------------------------------------------------------------------------------------


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        bound = server.add_insecure_port(f"{_bracketed(host)}:{port}")
    except RuntimeError:  # what grpc raises, without saying why
        bound = 0
    if not bound:
        raise _taken("router.grpc_port", host, port)
    return bound


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise _taken("router.http_port", host, port) from None
    return listener


def _taken(setting: str, host: str, port: int) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: the port is taken, or the address is not this machine's; set {setting} "
        "(0: any free port)",
        field=setting,
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: whoever runs the router decides when it ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _http(front: HttpFrontEnd, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        front.app(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=int(_STOP_GRACE_S)
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving


@asynccontextmanager
async def _running(work: object) -> AsyncIterator[None]:
    """Runs a coroutine beside the body; its failure is logged, not lost."""
    assert asyncio.iscoroutine(work)
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a task of the router failed", exc_info=task.exception())
