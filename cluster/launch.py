"""`kvferry up` and `kvferry down`: start a cluster, wait until it can serve, stop what was started."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.cluster.config import ClusterConfig
from kvferry.cluster.log_setup import set_aside_logs
from kvferry.cluster.processes import check_reachable, free_port
from kvferry.cluster.ray_head import RayHead, start_ray_head, stop_ray_head
from kvferry.cluster.roles import (
    RolePlan,
    WorkerSpec,
    backend_environ,
    check_policies,
    early_model_config,
    model_limits,
    plan_roles,
    threads_per_rank,
)
from kvferry.cluster.state_file import (
    ClusterState,
    alive,
    check_writable,
    log_dir,
    read_state,
    remove_state,
    write_state,
)
from kvferry.core import ConfigError, ModelLimits, UnavailableError, new_cluster_id
from kvferry.resolution import read_config

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
ROUTER_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything decided before the first process starts."""

    config: ClusterConfig
    cluster_id: str
    model_dir: Path
    limits: ModelLimits
    plans: tuple[RolePlan, ...]
    grpc_port: int
    http_port: int

    @property
    def router_endpoint(self) -> str:
        return f"{self.config.host}:{self.grpc_port}"

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model

    @property
    def worker_names(self) -> list[str]:
        return [name for plan in self.plans for name in plan.names]


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """workers: each one's start report (name, role, pid, endpoint, resolution, line)."""

    state: ClusterState
    workers: tuple[dict[str, Any], ...]


def draw_up(config: ClusterConfig, say: Say) -> Blueprint:
    """Checks all that can be checked without starting anything: errors here take a few seconds.

    Raises ConfigError naming the setting: a running cluster, a taken port, an impossible pair, a bad checkpoint, a
    device or memory that is not there.
    """
    _check_not_running(Path(config.state_dir))
    grpc_port = free_port(config.host, config.router.grpc_port, "router.grpc_port")
    http_port = free_port(config.host, config.router.http_port, "router.http_port")
    if config.ray_address:
        check_reachable(config.ray_address, "ray_address")
    check_policies(config)
    early = early_model_config(config.model)
    if early is not None:
        plan_roles(config, early, os.environ)
    check_writable(Path(config.state_dir))
    from kvferry.cluster.preflight import check_checkpoint, check_workers  # torch

    model_dir = _checkpoint(config.model, say)
    model_config = read_config(model_dir)
    plans = tuple(plan_roles(config, model_config, os.environ))
    if config.ray_address is None:
        check_workers(plans)
    check_checkpoint(model_dir, plans)
    return Blueprint(
        config=config,
        cluster_id=new_cluster_id(),
        model_dir=model_dir,
        limits=model_limits(model_dir, model_config, config.engine.max_context_tokens),
        plans=plans,
        grpc_port=grpc_port,
        http_port=http_port,
    )


def launch(blueprint: Blueprint, say: Say) -> RunningCluster:
    """Starts Ray (unless an address is set), the router and the workers; returns when all are ready and paired.

    Blocks up to `ready_timeout_s`. On any failure, Ctrl-C included, everything started is stopped again.
    """
    from kvferry.cluster import ray_driver  # ray

    config, state_dir = blueprint.config, Path(blueprint.config.state_dir)
    deadline = time.monotonic() + config.ready_timeout_s
    logs = log_dir(state_dir)
    set_aside_logs(logs)
    head = _start_head(blueprint, say)
    state = _first_state(blueprint, head)
    write_state(state_dir, state)
    try:
        with ray_driver.connected(state):
            say("starting the router")
            router = ray_driver.start_router(blueprint, logs, ROUTER_START_S)
            state = replace(state, grpc=router["grpc"], http=router["http"])
            write_state(state_dir, state)
            count = len(blueprint.worker_names)
            say(f"starting {count} worker{'s' if count > 1 else ''}: {', '.join(blueprint.worker_names)}")
            specs = worker_specs(blueprint, state.grpc, logs)
            workers = ray_driver.start_workers(state, specs, deadline - time.monotonic(), say)
        _wait_ready(state.grpc, blueprint.worker_names, deadline)
    except BaseException:
        stop(state_dir, state)
        raise
    return RunningCluster(state, tuple(workers))


def stop(state_dir: Path, state: ClusterState) -> list[str]:
    """Stops what this cluster started, and nothing else. Returns what could not be stopped (pids, actor names)."""
    left: list[str] = []
    if state.ray_head_pid is not None:
        left = [str(pid) for pid in stop_ray_head(state.cluster_id, state.ray_head_pid, state.ray_temp_dir)]
    else:
        from kvferry.cluster import ray_driver

        left = ray_driver.kill_actors(state)
    if not left:
        remove_state(state_dir)
    return left


def worker_specs(blueprint: Blueprint, router_endpoint: str, logs: Path) -> list[WorkerSpec]:
    config, total = blueprint.config, sum(plan.count * plan.ranks for plan in blueprint.plans)
    specs, first_core = [], 0
    for plan in blueprint.plans:
        threads = threads_per_rank(plan.config, total)
        for name in plan.names:
            spec = WorkerSpec(
                name=name,
                role=plan.role,
                model_dir=str(blueprint.model_dir),
                model_name=blueprint.model_name,
                config=plan.config,
                threads=threads,
                host=config.worker_host,
                router_endpoint=router_endpoint,
                log_dir=str(logs),
                log_level=config.log_level,
                cluster_id=blueprint.cluster_id,
                environ=tuple(backend_environ().items()),
                first_core=first_core,
            )
            specs.append(spec)
            first_core += threads * plan.ranks
    return specs


def _check_not_running(state_dir: Path) -> None:
    state = read_state(state_dir)
    if state is None:
        return
    if alive(state):
        raise ConfigError(
            f"cluster {state.cluster_id} is running from {state_dir}: stop it with `kvferry down "
            f"--state-dir {state_dir}`, or name another --state-dir",
            field="state_dir",
        )
    stop(state_dir, state)  # it died without `down`: clears what it left on disk


def _checkpoint(model: str, say: Say) -> Path:
    """The model's directory; a GGUF checkpoint is unpacked once, with a progress bar."""
    from kvferry.models import progress_bar, resolve_model  # torch

    say(f"model {model}")
    with progress_bar() as progress:
        return resolve_model(model, progress)


def _start_head(blueprint: Blueprint, say: Say) -> RayHead | None:
    if blueprint.config.ray_address:
        return None
    say("starting Ray")
    resources = {f"kvferry_{plan.role.value}": plan.count for plan in blueprint.plans}
    return start_ray_head(blueprint.cluster_id, resources)


def _first_state(blueprint: Blueprint, head: RayHead | None) -> ClusterState:
    return ClusterState(
        cluster_id=blueprint.cluster_id,
        model=blueprint.model_name,
        grpc=blueprint.router_endpoint,
        http=f"{blueprint.config.host}:{blueprint.http_port}",
        ray_address=head.address if head else str(blueprint.config.ray_address),
        ray_head_pid=head.pid if head else None,
        ray_temp_dir=head.temp_dir if head else None,
        actors=("router", *blueprint.worker_names),
    )


def _wait_ready(endpoint: str, names: list[str], deadline: float) -> None:
    from kvferry.cluster.admin_client import AdminClient

    problem: str | None = "the router has not answered"
    with AdminClient(endpoint) as admin:
        while problem is not None:
            if time.monotonic() > deadline:
                raise UnavailableError(f"the cluster is not ready in time: {problem}", field="ready_timeout_s")
            with contextlib.suppress(UnavailableError):
                problem = admin.not_ready(names)
            if problem is not None:
                time.sleep(0.1)
