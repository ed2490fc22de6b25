"""One worker in this process: resolve the pair, load the model, serve, and stay in the router's pool."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvferry.cluster.config_sources import is_loopback
from kvferry.cluster.membership import PoolMember
from kvferry.cluster.other_ranks import PipeRank, info_from_facts
from kvferry.cluster.preflight import check_ranks, check_worker_settings, engine_settings
from kvferry.cluster.roles import WorkerSpec, resolve_worker
from kvferry.cluster.worker_service import (
    PeerBook,
    RoleWorker,
    StatusSource,
    WorkerIdentity,
    add_worker_service,
)
from kvferry.core import ConfigError, RankProcess, Resolution, Role, codec, new_incarnation, resolved_line
from kvferry.decode import DecodeWorker
from kvferry.engine import Message, ModelRunner, RankCommand, RankLostError, open_connector, rank_device
from kvferry.kvcache import BackgroundCopier, KVCacheManager, create_manager
from kvferry.models import Shard, model_fingerprint
from kvferry.prefill import PrefillWorker
from kvferry.resolution import prefix_reuse_enabled, read_config
from kvferry.text import Tokenizer
from kvferry.transceiver import (
    PoolMemory,
    RankPlace,
    Transceiver,
    WireFormat,
    add_transceiver_service,
    create_transceiver,
    pool_memory,
    serve_ranks,
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
    check_worker_settings(spec.config)
    settings = engine_settings(spec.config, spec.threads, spec.first_core)
    check_ranks(settings, resolution, WireFormat(spec.config.transceiver.wire_format))
    runner = ModelRunner.load(model_dir, settings, _rank_command(spec, resolution))
    try:
        return _load_rest(spec, resolution, runner, model_config)
    except BaseException:
        runner.close()
        raise


def _rank_command(spec: WorkerSpec, resolution: Resolution) -> RankCommand:
    """How the worker's other ranks are started, if it has any."""
    transceiver = spec.config.transceiver
    return RankCommand(
        "kvferry.cluster.rank_process",
        {
            "worker": spec.name,
            "role": spec.role.value,
            "resolution": codec.resolution_to_bytes(resolution).hex(),
            "transfer_timeout_ms": transceiver.transfer_timeout_ms,
            "lease_s": transceiver.lease_s,
            "nixl_plugin": transceiver.nixl_plugin,
            "log_dir": spec.log_dir,
            "log_level": spec.log_level,
            "environ": dict(spec.environ),
        },
    )


def _load_rest(
    spec: WorkerSpec, resolution: Resolution, runner: ModelRunner, model_config: Mapping[str, Any]
) -> LoadedWorker:
    model_dir, device, cache = Path(spec.model_dir), spec.config.engine.device, spec.config.kv_cache
    reuse = prefix_reuse_enabled(model_config, resolution.manager, cache.prefix_reuse)
    memory = pool_memory(resolution)
    fingerprint = model_fingerprint(model_dir)
    connector = (
        open_connector(cache.connector, cache.connector_address, runner.layouts, fingerprint, runner.settings.precision)
        if cache.connector is not None
        else None
    )
    if runner.leader is not None:
        device = rank_device(runner.settings, 0)
    manager = create_manager(
        resolution.manager,
        runner.layouts,
        runner.pool_nbytes(cache.bytes),
        prefix_reuse=reuse,
        device=device,
        core=cache.core,
        debug=cache.debug,
        host_bytes=cache.host_bytes,
        disk_bytes=cache.disk_bytes,
        disk_dir=Path(cache.disk_dir) / fingerprint / spec.name if cache.disk_dir else None,
        connector=connector,
        allocate=memory.allocate if memory is not None else None,
        page_log=runner.page_log,
        event_capacity=cache.event_capacity,
        typical_tokens=cache.typical_tokens,
        step_tokens=runner.settings.step_token_budget,
        copier=BackgroundCopier(device) if cache.host_bytes else None,
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
    try:
        await _serve(loaded, ready)
    finally:
        await asyncio.to_thread(loaded.runner.close)


async def _serve(loaded: LoadedWorker, ready: Callable[[Serving], None]) -> None:
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
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    _watch_ranks(loaded.runner, lost)
    told = {"endpoint": endpoint, "incarnation": incarnation, "fingerprint": loaded.fingerprint}
    facts = await asyncio.to_thread(loaded.runner.open_pools, loaded.manager.pools, told)
    transceiver = _transceiver(loaded, endpoint, incarnation, facts)
    worker = _role_worker(loaded, transceiver)
    peers = PeerBook(set(), {})
    source = StatusSource(_identity(loaded, endpoint, incarnation, facts), worker, peers)
    try:
        worker.add_to(server)
        add_worker_service(server, source, loaded.manager.events)
        if transceiver is not None:
            add_transceiver_service(server, transceiver)
        await server.start()
        worker.start()
        sizes = (loaded.runner.settings.tensor_parallel, loaded.runner.settings.pipeline_parallel)
        line = resolved_line(spec.name, spec.role.value, loaded.resolution, sizes)
        logger.info("%s", line)
        ready(Serving(source, line))
        connect = worker.connect if isinstance(worker, DecodeWorker) and transceiver is not None else None
        await _until_lost(PoolMember(spec.router_endpoint, source, peers, connect).run(), lost)
    finally:
        await server.stop(STOP_GRACE_S)
        await asyncio.to_thread(worker.close)
        await asyncio.to_thread(loaded.manager.close)
        if loaded.memory is not None:
            loaded.memory.close()


def _watch_ranks(runner: ModelRunner, lost: asyncio.Future[None]) -> None:
    """`lost` gets a RankLostError when another rank of this worker has ended."""
    loop = asyncio.get_running_loop()

    def tell(reason: str) -> None:
        if not lost.done():
            lost.set_exception(RankLostError(reason))

    def on_lost(reason: str) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the server with it
            loop.call_soon_threadsafe(tell, reason)

    if runner.leader is not None:
        runner.leader.on_lost = on_lost


async def _until_lost(serving: Coroutine[Any, Any, None], lost: asyncio.Future[None]) -> None:
    """Runs `serving` until it ends, or a rank is lost: that error is raised, and the process must end."""
    task = asyncio.ensure_future(serving)
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        await (lost if lost.done() else task)
    finally:
        task.cancel()
        lost.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _transceiver(loaded: LoadedWorker, endpoint: str, incarnation: str, facts: Sequence[Message]) -> Transceiver | None:
    """facts: what the other ranks said of themselves."""
    if loaded.resolution.runtime is None:
        return None
    settings, leader = loaded.runner.settings, loaded.runner.leader
    own = create_transceiver(
        resolution=loaded.resolution,
        worker=loaded.spec.name,
        role=loaded.spec.role,
        incarnation=incarnation,
        model_fingerprint=loaded.fingerprint,
        pools=loaded.manager.pools,
        endpoint=endpoint,
        transfer_timeout_ms=loaded.spec.config.transceiver.transfer_timeout_ms,
        nixl_plugin=loaded.spec.config.transceiver.nixl_plugin,
        memory=loaded.memory,
        lease_s=loaded.spec.config.transceiver.lease_s,
        wire_format=WireFormat(loaded.spec.config.transceiver.wire_format),
        place=RankPlace(0, settings.tensor_parallel, 0, settings.pipeline_parallel),
    )
    if leader is None:
        return serve_ranks(own, ())
    others = [PipeRank(leader, number, info_from_facts(each)) for number, each in enumerate(facts, 1)]
    leader.on_message = lambda rank, message: others[rank - 1].heard(message)
    return serve_ranks(own, others)


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


def _identity(loaded: LoadedWorker, endpoint: str, incarnation: str, facts: Sequence[Message]) -> WorkerIdentity:
    spec, settings = loaded.spec, loaded.runner.settings
    pids = [os.getpid(), *(int(each["pid"]) for each in facts)]
    shards = [Shard.of_rank(rank, settings.tensor_parallel, settings.pipeline_parallel) for rank in range(len(pids))]
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
        ranks=tuple(
            RankProcess(shard.rank, shard.tp_rank, shard.pp_rank, pid) for shard, pid in zip(shards, pids, strict=True)
        ),
    )


def _own_address() -> str:
    """The address of this machine that others reach it by. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
        return address
