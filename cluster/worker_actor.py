"""The actor of a worker and the actor of the router."""

from __future__ import annotations

import os
import warnings

import ray

from kvferry.cluster.actors import ActorLog, Ready, Report, Serve, ServerHost
from kvferry.cluster.roles import WorkerSpec
from kvferry.resolution import resolution_dict
from kvferry.router import RouterAddresses, RouterSettings


class WorkerActor:
    """Process of one prefill, decode or aggregated worker."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._host = ServerHost(ActorLog(spec.name, spec.log_dir, spec.log_level))
        if _started_again():
            self._host.restart(self._build)

    def start(self, timeout_s: float) -> Report:
        """Loads and serves; blocks until requests can come. Errors are in the report: they must not restart it."""
        return self._host.start(self._build, timeout_s)

    def _build(self) -> Serve:
        from kvferry.cluster.worker import Serving, load_worker, serve_worker  # torch

        loaded = load_worker(self._spec)

        async def serve(ready: Ready) -> None:
            def report(serving: Serving) -> None:
                identity = serving.source.identity
                ready(
                    {
                        "role": identity.role.value,
                        "endpoint": identity.endpoint,
                        "incarnation": identity.incarnation,
                        "resolution": resolution_dict(identity.resolution),
                        "line": serving.line,
                    }
                )

            await serve_worker(loaded, report)

        return serve


class RouterActor:
    """Process of the router. Its ports are chosen before it starts, so a restarted one has the same address."""

    def __init__(self, settings: RouterSettings, log: ActorLog) -> None:
        self._settings = settings
        self._host = ServerHost(log)
        if _started_again():
            self._host.restart(self._build)

    def start(self, timeout_s: float) -> Report:
        return self._host.start(self._build, timeout_s)

    def _build(self) -> Serve:
        from kvferry.router import serve_router

        async def serve(ready: Ready) -> None:
            def report(addresses: RouterAddresses) -> None:
                ready({"grpc": addresses.grpc, "http": addresses.http, "router_pid": os.getpid()})

            await serve_router(self._settings, report)

        return serve


def _started_again() -> bool:
    """Whether Ray made this actor anew after its process died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own code behind this property uses a deprecated one
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
