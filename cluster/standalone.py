"""One server in this process, without Ray: for other supervisors (systemd, containers), and for tests.

    python -m kvferry.cluster.standalone router --model DIR --grpc-port 50051
    python -m kvferry.cluster.standalone prefill prefill-0 --router HOST:PORT --model DIR [--port N]
    python -m kvferry.cluster.standalone decode decode-0 --router HOST:PORT --model DIR [--port N]
    python -m kvferry.cluster.standalone aggregated --router HOST:PORT --model DIR --backend NONE

Further flags are settings (``--engine.max_batch 8``), -c names a file of them. One line of JSON on stdout says where
it serves, or what kept it from that; the log goes to stderr. SIGTERM and SIGINT end it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cluster.config import ClusterConfig
from kvferry.cluster.config_sources import load_config, parse_flags, worker_config
from kvferry.cluster.log_setup import RequestFormatter
from kvferry.cluster.processes import check_reachable, free_port
from kvferry.cluster.roles import (
    WorkerSpec,
    backend_environ,
    check_open_ports,
    model_limits,
    router_settings,
    threads_per_rank,
)
from kvferry.core import ConfigError, KVFerryError, Role
from kvferry.resolution import read_config, resolution_dict

logger = logging.getLogger(__name__)

ROUTER = "router"

Facts = dict[str, Any]
Serve = Callable[[Callable[[Facts], None]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Arguments:
    """port: the worker's; the router's are settings."""

    kind: str
    name: str
    router: str
    port: int
    config: ClusterConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to end. Returns 0, or 2 when it could not start."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        _log_to_stderr(arguments.name, arguments.config.log_level)
        serve = _router(arguments) if arguments.kind == ROUTER else _worker(arguments)
        asyncio.run(_until_signalled(serve))
    except KVFerryError as error:
        _say({"error": {"code": error.code.name, "message": error.message, "field": error.field}})
        return 2
    return 0


def _parse(argv: Sequence[str]) -> Arguments:
    roles = [role.value for role in Role]
    parser = argparse.ArgumentParser(prog="kvferry.cluster.standalone", allow_abbrev=False)
    parser.add_argument("kind", choices=[ROUTER, *roles])
    parser.add_argument("name", nargs="?", help="of a worker; default: ROLE-0")
    parser.add_argument("--router", default="", help="host:port of the router that a worker joins")
    parser.add_argument("--port", type=int, default=0, help="a worker's port; 0: any free one")
    parser.add_argument("-c", "--config", type=Path)
    known, rest = parser.parse_known_args(argv)
    if known.kind != ROUTER:
        if not known.router:
            raise ConfigError("a worker needs --router HOST:PORT", field="router")
        check_reachable(known.router, "router")
    config = load_config(known.config, parse_flags(rest))
    if known.port and config.worker_host != "auto":
        free_port(config.worker_host, known.port, "port")  # before anything slow is loaded
    if known.kind in roles and (known.kind == Role.AGGREGATED.value) != config.aggregated:
        raise ConfigError(f"role {known.kind} does not go with this transceiver.backend", field="transceiver.backend")
    name = known.name or (ROUTER if known.kind == ROUTER else f"{known.kind}-0")
    return Arguments(known.kind, name, known.router, known.port, config)


def _router(arguments: Arguments) -> Serve:
    from kvferry.router import RouterAddresses, serve_router

    config = arguments.config
    model_dir = _model_dir(config.model)
    limits = model_limits(model_dir, read_config(model_dir), config.engine.max_context_tokens)
    ports = config.router
    settings = router_settings(config, model_dir, limits, grpc_port=ports.grpc_port, http_port=ports.http_port)

    async def serve(ready: Callable[[Facts], None]) -> None:
        def report(addresses: RouterAddresses) -> None:
            ready({"grpc": addresses.grpc, "http": addresses.http})

        await serve_router(settings, report)

    return serve


def _worker(arguments: Arguments) -> Serve:
    from kvferry.cluster.worker import Serving, load_worker, serve_worker  # torch

    loaded = load_worker(_spec(arguments))
    check_open_ports(loaded.resolution, arguments.config)

    async def serve(ready: Callable[[Facts], None]) -> None:
        def report(serving: Serving) -> None:
            identity = serving.source.identity
            ready(
                {
                    "role": identity.role.value,
                    "endpoint": identity.endpoint,
                    "incarnation": identity.incarnation,
                    "resolution": resolution_dict(identity.resolution),
                }
            )

        await serve_worker(loaded, report)

    return serve


def _spec(arguments: Arguments) -> WorkerSpec:
    config, role = arguments.config, Role(arguments.kind)
    settings = worker_config(config, role)
    return WorkerSpec(
        name=arguments.name,
        role=role,
        model_dir=str(_model_dir(config.model)),
        model_name=config.served_model_name or config.model,
        config=settings,
        threads=threads_per_rank(settings, settings.engine.tensor_parallel * settings.engine.pipeline_parallel),
        host=config.worker_host,
        router_endpoint=arguments.router,
        log_dir="",
        log_level=config.log_level,
        cluster_id="",
        environ=tuple(backend_environ().items()),
        port=arguments.port,
    )


def _model_dir(model: str) -> Path:
    """Only a name or a GGUF file has to be unpacked by what imports torch."""
    if (Path(model).expanduser() / "config.json").is_file():
        return Path(model).expanduser().resolve()
    from kvferry.models import resolve_model

    return resolve_model(model)


async def _until_signalled(serve: Serve) -> None:
    def ready(facts: Facts) -> None:
        _say({"pid": os.getpid(), **facts})

    serving = asyncio.ensure_future(serve(ready))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        logger.info("told to end")


def _say(facts: Facts) -> None:
    print(json.dumps(facts), flush=True)


def _log_to_stderr(name: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RequestFormatter(name))
    logging.basicConfig(level=level, handlers=[handler], force=True)


if __name__ == "__main__":
    sys.exit(main())
