"""What the launcher does through Ray: place actors, start them, kill them. Connected for as long as that takes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # its stub lacks them
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry.cluster.actors import ActorLog
from kvferry.cluster.log_setup import log_path
from kvferry.cluster.processes import CLUSTER_VARIABLE, check_reachable
from kvferry.cluster.ray_head import token_environ
from kvferry.cluster.roles import WorkerSpec, router_settings
from kvferry.cluster.state_file import ClusterState
from kvferry.cluster.worker_actor import RouterActor, WorkerActor
from kvferry.core import ConfigError, UnavailableError

if TYPE_CHECKING:
    from kvferry.cluster.launch import Blueprint, Say

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
ROUTER = "router"


@contextlib.contextmanager
def connected(state: ClusterState) -> Iterator[None]:
    """A connection to the cluster's Ray. Actors are detached: they outlive it. Raises UnavailableError."""
    # Ray puts the driver's working directory on its workers' import path: it must not be the repository.
    before = os.getcwd()
    os.chdir(state.ray_temp_dir or "/")
    try:
        with _own_cluster(state):
            _connect(state)
            try:
                yield
            finally:
                ray.shutdown()
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _own_cluster(state: ClusterState) -> Iterator[None]:
    """On a Ray cluster of our own: its token, and loopback as this node's address, as the head has it
    (`ray_head`). On somebody else's nothing changes."""
    if state.ray_temp_dir is None:
        yield
        return
    before, clustered = dict(os.environ), ray_constants.ENABLE_RAY_CLUSTER
    try:
        _use_environ(token_environ(os.environ, state.ray_temp_dir))
        # Read from the environment once, when Ray was imported.
        ray_constants.ENABLE_RAY_CLUSTER = False
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clustered
        _use_environ(before)


def _use_environ(environ: Mapping[str, str]) -> None:
    """Makes this process's environment equal to `environ`, and Ray, which read it when imported, look again."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def start_router(blueprint: Blueprint, logs: Path, timeout_s: float) -> dict[str, Any]:
    config = blueprint.config
    settings = router_settings(
        config,
        blueprint.model_dir,
        blueprint.limits,
        grpc_port=blueprint.grpc_port,
        http_port=blueprint.http_port,
    )
    # On this node: its address is what clients are told.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = _options(blueprint.cluster_id, ROUTER, threads=1) | {"scheduling_strategy": here}
    actor = ray.remote(RouterActor).options(**options).remote(settings, ActorLog(ROUTER, str(logs), config.log_level))
    report = _get([actor.start.remote(timeout_s)], timeout_s + CONNECT_TIMEOUT_S, logs, [ROUTER])[0]
    return _checked(report, logs)


def start_workers(state: ClusterState, specs: Sequence[WorkerSpec], timeout_s: float, say: Say) -> list[dict[str, Any]]:
    """Starts all at once; returns their reports in order. Raises for the first that fails."""
    started = {}
    for spec in specs:
        options = _options(state.cluster_id, spec.name, spec.threads)
        options["resources"] = {f"kvferry_{spec.role.value}": 1}
        actor = ray.remote(WorkerActor).options(**options).remote(spec)
        started[actor.start.remote(timeout_s)] = spec
    reports: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    waiting = list(started)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            names = ", ".join(started[reference].name for reference in waiting)
            raise UnavailableError(
                f"not started in time: {names}. Does the Ray cluster offer the resources "
                f"{sorted({f'kvferry_{started[reference].role.value}' for reference in waiting})}?",
                field="ready_timeout_s",
            )
        spec = started[done[0]]
        report = _checked(_get(done, 10.0, Path(spec.log_dir), [spec.name])[0], Path(spec.log_dir))
        reports[spec.name] = report
        say(report["line"])
    return [reports[spec.name] for spec in specs]


def kill_actors(state: ClusterState) -> list[str]:
    """Ends this cluster's actors on a Ray cluster that stays up. Returns the names of those it could not end."""
    left = []
    try:
        with connected(state):
            for name in state.actors:
                try:
                    ray.kill(ray.get_actor(name, namespace=state.cluster_id), no_restart=True)
                except ValueError:  # Ray knows none by this name: it has ended
                    continue
                except RayError as error:
                    logger.warning("cannot end actor %s: %s", name, error)
                    left.append(name)
    except UnavailableError as error:
        # Without its Ray cluster no actor of it can live.
        logger.warning("%s", error.message)
    return left


def _connect(state: ClusterState) -> None:
    # Ray itself would try for minutes.
    check_reachable(state.ray_address, "ray_address")
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            ray.init(
                address=state.ray_address,
                namespace=state.cluster_id,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
            return
        except (ConnectionError, RuntimeError, OSError, RayError) as error:
            ray.shutdown()
            # A head that has just been started needs a moment; somebody else's must be there already.
            if state.ray_head_pid is None or time.monotonic() > deadline:
                raise UnavailableError(
                    f"no Ray cluster answers at {state.ray_address}: {error}", field="ray_address"
                ) from None
            time.sleep(0.2)


def _options(cluster_id: str, name: str, threads: int) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": cluster_id,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": 0,
        "max_concurrency": 2,
        "runtime_env": {
            "env_vars": {
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "PYTHONSAFEPATH": "1",
                CLUSTER_VARIABLE: cluster_id,
            }
        },
    }


def _get(references: list[Any], timeout_s: float, logs: Path, names: list[str]) -> list[dict[str, Any]]:
    try:
        reports: list[dict[str, Any]] = ray.get(references, timeout=timeout_s)
        return reports
    except RayError as error:
        raise UnavailableError(
            f"{', '.join(names)} did not start: {error}\n{_tail(log_path(logs, names[0]))}", field=""
        ) from None


def _checked(report: dict[str, Any], logs: Path) -> dict[str, Any]:
    if "error" not in report:
        return report
    message = f"{report['name']}: {report['error']} (log: {log_path(logs, report['name'])})"
    raise (ConfigError if report.get("field") else UnavailableError)(message, field=report.get("field", ""))


def _tail(path: Path, lines: int = 20) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
