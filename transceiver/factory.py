"""Builds the transceiver of a resolved pair, and the memory its pools must live in."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from kvferry.core import ConfigError, Resolution, Role
from kvferry.kvcache import KVPool
from kvferry.resolution import build_gaps, default_catalog
from kvferry.transceiver.base import Transceiver
from kvferry.transceiver.implementation import Implementation, RuntimeTimes, TransceiverParts, WorkerIdentity
from kvferry.transceiver.memory import PoolMemory

_BACKEND_SETTING = "transceiver.backend"
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
    transfer_timeout_ms: int,
    memory: PoolMemory | None = None,
    lease_s: float = 30.0,
) -> Transceiver:
    """The transceiver `resolution` names, with `pools` registered and its threads running; `close` it before the
    pools go. endpoint: host:port where `add_transceiver_service` will be reachable for peers. memory: what
    `pool_memory` gave.

    Raises ConfigError naming `transceiver.backend` or `transceiver.runtime` when the pair is not in this version,
    its library is missing, or a time makes no sense.
    """
    if transfer_timeout_ms <= 0:
        message = f"transfer_timeout_ms must be at least 1, got {transfer_timeout_ms}"
        raise ConfigError(message, field="transceiver.transfer_timeout_ms")
    if lease_s <= 0:
        raise ConfigError(f"lease_s must be above 0, got {lease_s}", field="transceiver.lease_s")
    implementation = find_implementation(resolution)
    identity = WorkerIdentity(
        worker=worker,
        role=role,
        incarnation=incarnation,
        endpoint=endpoint,
        model_fingerprint=model_fingerprint,
        resolution=resolution,
    )
    times = RuntimeTimes(
        transfer_timeout_s=transfer_timeout_ms / 1000, lease_s=lease_s, max_lease_s=_MAX_LEASES * lease_s
    )
    return implementation.build(TransceiverParts(identity, pools, times, memory))


def find_implementation(resolution: Resolution) -> Implementation:
    """Imports what the catalog declares for the route of `resolution`, built in or a third party's."""
    catalog = default_catalog()
    for gap in build_gaps(resolution, catalog=catalog):
        raise ConfigError(gap.message, field=gap.setting)
    transceiver = catalog.transceiver(resolution.backend)
    runtime = transceiver.runtime(resolution.runtime) if transceiver and resolution.runtime else None
    if runtime is None or runtime.implementation is None:
        raise ConfigError(f"backend {resolution.backend} has no transceiver", field=_BACKEND_SETTING)
    module, _, attribute = runtime.implementation.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"transceiver {resolution.transceiver}: {runtime.implementation} cannot be imported: {error}",
            field=_BACKEND_SETTING,
        ) from error
    if not isinstance(found, Implementation):
        raise ConfigError(
            f"transceiver {resolution.transceiver}: {runtime.implementation} must be a "
            f"kvferry.transceiver.Implementation, not {type(found).__name__}",
            field=_BACKEND_SETTING,
        )
    return found
