"""Which workers a configuration asks for, and what pair each role resolves to: before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cluster.config import ClusterConfig, WorkerConfig
from kvferry.cluster.config_sources import worker_config
from kvferry.core import CheckpointError, ConfigError, ModelLimits, Resolution, Role, Source
from kvferry.resolution import (
    PairFacts,
    ResolveRequest,
    can_pair,
    check_buildable,
    default_catalog,
    original_architecture,
    prefix_reuse_enabled,
    probe_libraries,
    read_config,
    resolve,
)
from kvferry.router import POLICIES, RouterSettings, Schedule

_BACKEND_VARIABLES = "KVFERRY_USE_"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker process needs to know. Picklable: it travels to the worker once, at its start.

    port: of its gRPC server on `host`; 0: any free one. first_core: how many compute threads of other workers come
    before its own, where threads are bound to cores.
    """

    name: str
    role: Role
    model_dir: str
    model_name: str
    config: WorkerConfig
    threads: int
    host: str
    router_endpoint: str
    log_dir: str
    log_level: str
    cluster_id: str
    environ: tuple[tuple[str, str], ...] = ()
    port: int = 0
    first_core: int = 0


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One role of the cluster: how many workers, their settings and the pair they will run with."""

    role: Role
    count: int
    config: WorkerConfig
    resolution: Resolution

    @property
    def ranks(self) -> int:
        """Processes of one worker."""
        return self.config.engine.tensor_parallel * self.config.engine.pipeline_parallel

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.role.value}-{index}" for index in range(self.count))


def plan_roles(config: ClusterConfig, model_config: Mapping[str, Any], environ: Mapping[str, str]) -> list[RolePlan]:
    """Resolves every role that has workers. Raises ConfigError (ResolutionError) naming the setting to change."""
    plans = []
    for role in Role:
        count = config.role_count(role)
        if count:
            settings = worker_config(config, role, model_config)
            resolution = resolve_worker(settings, model_config, environ)
            check_open_ports(resolution, config)
            plans.append(RolePlan(role, count, settings, resolution))
    _check_pairs(plans)
    return plans


def resolve_worker(config: WorkerConfig, model_config: Mapping[str, Any], environ: Mapping[str, str]) -> Resolution:
    """The pair a worker with these settings runs with, known to be built and installed here."""
    variables = backend_environ(environ)
    request = ResolveRequest(
        architecture=original_architecture(model_config),
        config=model_config,
        backend=config.transceiver.backend,
        runtime=config.transceiver.runtime,
        manager=config.kv_cache.manager,
        transfer_timeout_ms=config.transceiver.transfer_timeout_ms,
        kv_connector=config.kv_cache.connector,
        speculative=config.engine.speculative,
        prefix_reuse=config.kv_cache.prefix_reuse,
        environ=variables,
        missing_libraries=probe_libraries(config.transceiver.backend, variables),
    )
    resolution = resolve(request)
    check_buildable(resolution, request)
    _check_stores(config, model_config, resolution)
    return resolution


def check_open_ports(resolution: Resolution, config: ClusterConfig) -> None:
    """Raises ConfigError when the backend would open ports that were not allowed."""
    transceiver = default_catalog().transceiver(resolution.backend)
    if transceiver is not None and transceiver.open_ports and not config.insecure_bind:
        raise ConfigError(
            f"backend {resolution.backend} listens on every network interface, and nothing is encrypted or "
            "authenticated: set insecure_bind true to allow it, or change transceiver.backend",
            field="insecure_bind",
        )


def _check_stores(config: WorkerConfig, model_config: Mapping[str, Any], resolution: Resolution) -> None:
    """What lies below the pools fits the manager. It refuses too, after the weights have been loaded."""
    cache = config.kv_cache
    if cache.disk_bytes and resolution.manager == "V1":
        raise ConfigError(
            f"kv_cache.disk_bytes is {cache.disk_bytes}, but the manager is V1, which has no tier below host memory "
            f"({resolution.reason}): set it to 0",
            field="kv_cache.disk_bytes",
        )
    if cache.connector is not None and not prefix_reuse_enabled(model_config, resolution.manager, cache.prefix_reuse):
        raise ConfigError(
            f"kv_cache.connector is {cache.connector}, but prefix reuse is off, without which it neither keeps nor "
            "finds anything: leave it out, or set kv_cache.prefix_reuse to true",
            field="kv_cache.connector",
        )


def backend_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that backend DEFAULT looks at."""
    return {name: value for name, value in environ.items() if name.startswith(_BACKEND_VARIABLES)}


def early_model_config(model: str) -> Mapping[str, Any] | None:
    """config.json without unpacking or importing anything heavy; None when only the checkpoint itself can tell."""
    if Path(model).expanduser().is_file():
        return None
    return read_config(model)


def model_limits(model_dir: Path, model_config: Mapping[str, Any], max_context_tokens: int | None) -> ModelLimits:
    """What the router checks requests against: what config.json says (a wrapper's text part counts), and where it
    leaves a size out, what its model class means by that.

    Raises CheckpointError for a bad size, ConfigError when the setting exceeds what the model was made for.
    """
    text = model_config.get("text_config")
    merged = {**model_config, **(text if isinstance(text, Mapping) else {})}
    sizes = [merged.get(key) for key in ("vocab_size", "max_position_embeddings")]
    if None in sizes:
        from kvferry.models import inspect_model  # torch

        limits = inspect_model(model_dir).limits
    else:
        limits = ModelLimits(*(_size(key, merged) for key in ("vocab_size", "max_position_embeddings")))
    if max_context_tokens is None:
        return limits
    if max_context_tokens > limits.max_context_tokens:
        raise ConfigError(
            f"engine.max_context_tokens is {max_context_tokens}, but the model was made for "
            f"{limits.max_context_tokens}",
            field="engine.max_context_tokens",
        )
    return ModelLimits(limits.vocab_size, max_context_tokens)


def _size(key: str, config: Mapping[str, Any]) -> int:
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}", field="model")
    return value


def router_settings(
    config: ClusterConfig, model_dir: Path, limits: ModelLimits, *, grpc_port: int, http_port: int
) -> RouterSettings:
    """What the router of this configuration is told. Raises ConfigError."""
    check_policies(config)
    return RouterSettings(
        model_name=config.served_model_name or config.model,
        model_dir=model_dir,
        limits=limits,
        host=config.host,
        grpc_port=grpc_port,
        http_port=http_port,
        prefill_policy=config.router.prefill_policy,
        decode_policy=config.router.decode_policy,
        schedule=Schedule(config.router.schedule),
        max_running=config.router.max_running,
        max_queued=config.router.max_queued,
        worker_wait_s=config.router.worker_wait_s,
        retry_budget=config.router.retries,
        queue_timeout_s=config.router.queue_timeout_s,
        request_timeout_s=config.router.request_timeout_s,
        lost_after_s=config.router.lost_after_s,
    )


def check_policies(config: ClusterConfig) -> None:
    """Raises ConfigError naming the setting of an unknown routing policy."""
    for key in ("prefill_policy", "decode_policy"):
        name = getattr(config.router, key)
        if name not in POLICIES:
            known = ", ".join(POLICIES.names())
            raise ConfigError(f"router.{key} {name!r} is unknown: known are {known}", field=f"router.{key}")


def threads_per_rank(config: WorkerConfig, ranks: int, cores: int | None = None) -> int:
    """The setting, or an equal share of this machine's cores: processes that share cores fight over them badly.
    ranks: of all workers on this machine."""
    available = cores if cores is not None else len(os.sched_getaffinity(0))
    return config.engine.threads or max(1, available // max(1, ranks))


def _check_pairs(plans: list[RolePlan]) -> None:
    """Both roles of a disaggregated cluster must be able to talk; overrides can keep them from it."""
    by_role = {plan.role: plan for plan in plans}
    if Role.PREFILL not in by_role or Role.DECODE not in by_role:
        return
    prefill, decode = (
        PairFacts(f"{plan.role.value} workers", "", plan.config.kv_cache.dtype, plan.resolution)
        for plan in (by_role[Role.PREFILL], by_role[Role.DECODE])
    )
    problem = can_pair(prefill, decode)
    if problem:
        raise ConfigError(
            f"{problem}: set transceiver.runtime, kv_cache.manager and kv_cache.dtype alike for both roles",
            field=_setting_at_fault(prefill, decode),
        )


def _setting_at_fault(ours: PairFacts, theirs: PairFacts) -> str:
    """A manager that was demoted follows from the runtime; another one was set, or is the model's."""
    if ours.kv_dtype != theirs.kv_dtype:
        return "kv_cache.dtype"
    prefill, decode = ours.resolution, theirs.resolution
    demoted = Source.DEMOTED in (prefill.manager_source, decode.manager_source)
    return "kv_cache.manager" if prefill.manager != decode.manager and not demoted else "transceiver.runtime"
