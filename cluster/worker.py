"""One worker in this process: resolve the pair, load the model, serve, and stay in the router's pool."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvferry.cluster.config_sources import is_loopback
from kvferry.cluster.membership import PoolMember
from kvferry.cluster.preflight import check_worker_settings, engine_settings
from kvferry.cluster.roles import WorkerSpec, resolve_worker
from kvferry.cluster.worker_service import PeerBook, RoleWorker, StatusSource, WorkerIdentity, add_worker_service
from kvferry.core import ConfigError, Resolution, Role, new_incarnation, resolved_line
from kvferry.decode import DecodeWorker
from kvferry.engine import ModelRunner, open_connector
from kvferry.kvcache import KVCacheManager, create_manager
from kvferry.models import model_fingerprint
from kvferry.prefill import PrefillWorker
from kvferry.resolution import prefix_reuse_enabled, read_config
from kvferry.text import Tokenizer
from kvferry.transceiver import (
    PoolMemory,
    Transceiver,
    WireFormat,
    add_transceiver_service,
    create_transceiver,
    pool_memory,
)

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """What a worker has before it has an address: everything slow is in here."""

    spec: WorkerSpec
    resolution: Resolution
    runner: ModelRunner
    manager: KVCacheManager
    memory: PoolMemory | None
    tokenizer: Tokenizer
    fingerprint: str


def load_worker(spec: WorkerSpec) -> LoadedWorker:
    """Resolves and loads; slow. Raises ConfigError and CheckpointError."""
    model_dir = Path(spec.model_dir)
    model_config = read_config(model_dir)
    resolution = resolve_worker(spec.config, model_config, dict(spec.environ))
    if is_loopback(spec.host):
        # UCX would listen on every interface, with neither encryption nor authentication.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    for warning in resolution.warnings:
        logger.warning("%s", warning)
    device, cache = spec.config.engine.device, spec.config.kv_cache
    check_worker_settings(spec.config)
    runner = ModelRunner.load(model_dir, engine_settings(spec.config, spec.threads))
    reuse = prefix_reuse_enabled(model_config, resolution.manager, cache.prefix_reuse)
    memory = pool_memory(resolution)
    fingerprint = model_fingerprint(model_dir)
    connector = (
        open_connector(cache.connector, cache.connector_address, runner.layouts, fingerprint, runner.settings.precision)
        if cache.connector is not None
        else None
    )
    manager = create_manager(
        resolution.manager,
        runner.layouts,
        cache.bytes,
        prefix_reuse=reuse,
        device=device,
        core=cache.core,
        host_bytes=cache.host_bytes,
        disk_bytes=cache.disk_bytes,
        disk_dir=Path(cache.disk_dir) / fingerprint / spec.name if cache.disk_dir else None,
        connector=connector,
        allocate=memory.allocate if memory is not None else None,
    )
    tokenizer = Tokenizer.load(model_dir)
    return LoadedWorker(spec, resolution, runner, manager, memory, tokenizer, fingerprint)


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker that answers at its endpoint."""

    source: StatusSource
    line: str


async def serve_worker(loaded: LoadedWorker, ready: Callable[[Serving], None]) -> None:
    """Serves until cancelled; `ready` is called once, when requests can come. Owns everything it starts."""
    spec = loaded.spec
    # so_reuseport off: two workers must never share a port by accident.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)])
    host = _own_address() if spec.host == "auto" else spec.host
    try:
        port = server.add_insecure_port(f"{host}:{spec.port}")
    except RuntimeError as error:
        raise ConfigError(f"worker {spec.name} cannot bind {host}:{spec.port}: {error}", field="worker_host") from None
    endpoint = f"{host}:{port}"
    incarnation = new_incarnation()
    transceiver = _transceiver(loaded, endpoint, incarnation)
    worker = _role_worker(loaded, transceiver)
    peers = PeerBook(set(), {})
    source = StatusSource(_identity(loaded, endpoint, incarnation), worker, peers)
    try:
        worker.add_to(server)
        add_worker_service(server, source)
        if transceiver is not None:
            add_transceiver_service(server, transceiver)
        await server.start()
        worker.start()
        line = resolved_line(spec.name, spec.role.value, loaded.resolution)
        logger.info("%s", line)
        ready(Serving(source, line))
        connect = worker.connect if isinstance(worker, DecodeWorker) and transceiver is not None else None
        await PoolMember(spec.router_endpoint, source, peers, connect).run()
    finally:
        await server.stop(STOP_GRACE_S)
        await asyncio.to_thread(worker.close)
        await asyncio.to_thread(loaded.manager.close)
        if loaded.memory is not None:
            loaded.memory.close()


def _transceiver(loaded: LoadedWorker, endpoint: str, incarnation: str) -> Transceiver | None:
    if loaded.resolution.runtime is None:
        return None
    return create_transceiver(
        resolution=loaded.resolution,
        worker=loaded.spec.name,
        role=loaded.spec.role,
        incarnation=incarnation,
        model_fingerprint=loaded.fingerprint,
        pools=loaded.manager.pools,
        endpoint=endpoint,
        transfer_timeout_ms=loaded.spec.config.transceiver.transfer_timeout_ms,
        memory=loaded.memory,
        lease_s=loaded.spec.config.transceiver.lease_s,
        wire_format=WireFormat(loaded.spec.config.transceiver.wire_format),
    )


def _role_worker(loaded: LoadedWorker, transceiver: Transceiver | None) -> RoleWorker:
    name = loaded.spec.name
    if loaded.spec.role is Role.PREFILL:
        assert transceiver is not None, "a prefill role is never planned on backend NONE"
        return PrefillWorker(name, loaded.runner, loaded.manager, transceiver, loaded.tokenizer)
    settings = loaded.spec.config.transceiver
    return DecodeWorker(
        name,
        loaded.runner,
        loaded.manager,
        transceiver,
        loaded.tokenizer,
        recompute=settings.on_transfer_failure == "recompute",
        max_quarantined=settings.max_quarantined,
    )


def _identity(loaded: LoadedWorker, endpoint: str, incarnation: str) -> WorkerIdentity:
    spec = loaded.spec
    return WorkerIdentity(
        name=spec.name,
        role=spec.role,
        incarnation=incarnation,
        endpoint=endpoint,
        model=spec.model_name,
        model_fingerprint=loaded.fingerprint,
        kv_dtype=loaded.runner.layouts[0].dtype.value,
        kv_cache_core=loaded.manager.core,
        max_batch=loaded.runner.settings.max_batch,
        resolution=loaded.resolution,
    )


def _own_address() -> str:
    """The address of this machine that others reach it by. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
        return address
