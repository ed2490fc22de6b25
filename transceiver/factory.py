"""Builds the transceiver of a resolved pair, and the memory its pools must live in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module

from kvferry.core import ConfigError, Resolution, Role, rank_incarnation
from kvferry.kvcache import KVPool
from kvferry.kvcache.pool import build_pool
from kvferry.resolution import RuntimeCapability, build_gaps, default_catalog
from kvferry.transceiver.base import Transceiver
from kvferry.transceiver.implementation import (
    SOLE_RANK,
    Implementation,
    RankPlace,
    RuntimeTimes,
    TransceiverParts,
    WorkerIdentity,
)
from kvferry.transceiver.memory import PoolMemory
from kvferry.transceiver.python_runtime import PythonTransceiver
from kvferry.transceiver.ranked import OtherRank, RankedTransceiver
from kvferry.transceiver.wire_format import WireFormat, wire_layouts
from kvferry.transceiver.wire_pool import WirePools
from kvferry.transceiver.wire_transceiver import WireTransceiver

_BACKEND_SETTING = "transceiver.backend"
_TIMEOUT_SETTING = "transceiver.transfer_timeout_ms"
RANKS_NEED_PYTHON = (
    "workers of several ranks exchange KV through transceiver.runtime PYTHON alone: choose a backend and settings that "
    "it runs with, or set engine.tensor_parallel and engine.pipeline_parallel to 1"
)
_MAX_LEASES = 10
"""The hard cap of a hand-off's pin, in leases."""


def pool_memory(resolution: Resolution) -> PoolMemory | None:
    """What the pools of a worker must be allocated from, before `create_transceiver`; the caller closes it after the
    transceiver. None: plain host memory. Raises ConfigError as `create_transceiver` does."""
    if resolution.runtime is None:
        return None
    make = find_implementation(resolution).memory
    return make() if make is not None else None


def create_transceiver(
    *,
    resolution: Resolution,
    worker: str,
    role: Role,
    incarnation: str,
    model_fingerprint: str,
    pools: Sequence[KVPool],
    endpoint: str,
    transfer_timeout_ms: int | None,
    memory: PoolMemory | None = None,
    lease_s: float = 30.0,
    wire_format: WireFormat = WireFormat.STORED,
    place: RankPlace = SOLE_RANK,
    nixl_plugin: str = "UCX",
) -> Transceiver:
    """The transceiver `resolution` names, with `pools` registered and its threads running; `close` it before the
    pools go. endpoint: host:port where `add_transceiver_service` will be reachable for peers. memory: what
    `pool_memory` gave. wire_format: other than STORED it takes memory for as many blocks as `pools` have, in 8 bits.
    place: of this rank; each has a transceiver, and rank 0's is wrapped by `serve_ranks`.
    nixl_plugin: for backend NIXL, others ignore it.

    Raises ConfigError naming the setting at fault when the pair is not in this version, its library or plug-in is
    missing, or a time makes no sense. transfer_timeout_ms None: loads end only with their lease.
    """
    if transfer_timeout_ms is not None and transfer_timeout_ms <= 0:
        message = f"transfer_timeout_ms must be at least 1, got {transfer_timeout_ms}"
        raise ConfigError(message, field=_TIMEOUT_SETTING)
    if lease_s <= 0:
        raise ConfigError(f"lease_s must be above 0, got {lease_s}", field="transceiver.lease_s")
    runtime = _runtime(resolution)
    if runtime.needs_finite_timeout and transfer_timeout_ms is None:
        message = f"transceiver {resolution.transceiver} needs a finite transfer_timeout_ms"
        raise ConfigError(message, field=_TIMEOUT_SETTING)
    implementation = find_implementation(resolution)
    identity = WorkerIdentity(
        worker=worker,
        role=role,
        incarnation=rank_incarnation(incarnation, place.pp_rank * place.tp_size + place.tp_rank),
        endpoint=endpoint,
        model_fingerprint=model_fingerprint,
        resolution=resolution,
        place=place,
    )
    times = RuntimeTimes(
        transfer_timeout_s=math.inf if transfer_timeout_ms is None else transfer_timeout_ms / 1000,
        lease_s=lease_s,
        max_lease_s=_MAX_LEASES * lease_s,
    )
    if wire_format is WireFormat.STORED:
        return implementation.build(TransceiverParts(identity, pools, times, memory, nixl_plugin))
    allocate = memory.allocate if memory is not None else None
    layouts = wire_layouts([pool.layout for pool in pools], wire_format)
    wire = [build_pool(layout, pool.num_blocks, "cpu", allocate) for layout, pool in zip(layouts, pools, strict=True)]
    return WireTransceiver(
        implementation.build(TransceiverParts(identity, wire, times, memory, nixl_plugin)), WirePools(pools, wire)
    )


def serve_ranks(own: Transceiver, others: Sequence[OtherRank]) -> Transceiver:
    """The transceiver of a worker, given that of its rank 0, which it takes over. others: its other ranks.

    Raises ConfigError when there are others and the runtime serves one rank only."""
    if isinstance(own, PythonTransceiver):
        return RankedTransceiver(own, others)
    if others:
        raise ConfigError(RANKS_NEED_PYTHON, field="transceiver.runtime")
    return own


def find_implementation(resolution: Resolution) -> Implementation:
    """Imports what the catalog declares for the route of `resolution`, built in or a third party's."""
    path = _runtime(resolution).implementation
    assert path is not None
    module, _, attribute = path.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        message = f"transceiver {resolution.transceiver}: {path} cannot be imported: {error}"
        raise ConfigError(message, field=_BACKEND_SETTING) from error
    if not isinstance(found, Implementation):
        raise ConfigError(
            f"transceiver {resolution.transceiver}: {path} must be a kvferry.transceiver.Implementation, not "
            f"{type(found).__name__}",
            field=_BACKEND_SETTING,
        )
    return found


def _runtime(resolution: Resolution) -> RuntimeCapability:
    """What is declared of the route. ConfigError when this version has no implementation of it."""
    catalog = default_catalog()
    for gap in build_gaps(resolution, catalog=catalog):
        raise ConfigError(gap.message, field=gap.setting)
    transceiver = catalog.transceiver(resolution.backend)
    runtime = transceiver.runtime(resolution.runtime) if transceiver and resolution.runtime else None
    if runtime is None:
        raise ConfigError(f"backend {resolution.backend} has no transceiver", field=_BACKEND_SETTING)
    return runtime
