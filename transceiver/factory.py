"""Builds the transceiver of a resolved pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.core import ConfigError, Registry, Resolution, Role
from kvferry.kvcache import KVPool
from kvferry.transceiver.base import Agent, Transceiver
from kvferry.transceiver.control_client import GrpcControlClient
from kvferry.transceiver.python_runtime import PythonTransceiver, RuntimeTimes, WorkerIdentity

_MAX_LEASES = 10
"""The hard cap of a hand-off's pin, in leases."""

Builder = Callable[[WorkerIdentity, Sequence[KVPool], RuntimeTimes], Transceiver]

TRANSCEIVERS: Registry[Builder] = Registry("transceiver (backend/runtime)", "transceiver.backend")
"""By `BACKEND/RUNTIME`, as a resolution shows it."""


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
    lease_s: float = 30.0,
) -> Transceiver:
    """The transceiver `resolution` names, with `pools` registered and its threads running; `close` it before the
    pools go. endpoint: host:port where `add_transceiver_service` will be reachable for peers.

    Raises ConfigError naming `transceiver.backend` or `transceiver.runtime` when the pair is not in this version,
    its library is missing, or a time makes no sense.
    """
    if transfer_timeout_ms <= 0:
        message = f"transfer_timeout_ms must be at least 1, got {transfer_timeout_ms}"
        raise ConfigError(message, field="transceiver.transfer_timeout_ms")
    if lease_s <= 0:
        raise ConfigError(f"lease_s must be above 0, got {lease_s}", field="transceiver.lease_s")
    builder = _builder(resolution)
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
    return builder(identity, pools, times)


def _builder(resolution: Resolution) -> Builder:
    if resolution.transceiver in TRANSCEIVERS:
        return TRANSCEIVERS.get(resolution.transceiver)
    known = [name.partition("/") for name in TRANSCEIVERS]
    field = "transceiver.runtime" if resolution.backend in {name[0] for name in known} else "transceiver.backend"
    raise ConfigError(
        f"transceiver {resolution.transceiver} is not built in this version; available: {', '.join(TRANSCEIVERS)} "
        f"(set transceiver.backend and transceiver.runtime)",
        field=field,
    )


def _python_over(make_agent: Callable[[str], Agent]) -> Builder:
    def build(identity: WorkerIdentity, pools: Sequence[KVPool], times: RuntimeTimes) -> Transceiver:
        agent = make_agent(identity.incarnation)
        return PythonTransceiver(identity, pools, agent, GrpcControlClient(), times)

    return build


def _nixl(incarnation: str) -> Agent:
    from kvferry.transceiver.nixl import NixlAgent

    return NixlAgent(incarnation)


TRANSCEIVERS.register("NIXL/PYTHON", _python_over(_nixl))
