"""What a transceiver declares as its implementation: how to build it, and where pools must live for it.

A `RuntimeCapability.implementation` is the lazy path of an `Implementation`, for kvferry's own transceivers and for
third parties' alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core import Resolution, Role
from kvferry.kvcache import KVPool
from kvferry.transceiver.base import Transceiver
from kvferry.transceiver.memory import PoolMemory

NIXL_PLUGIN_SETTING = "transceiver.nixl_plugin"


@dataclass(frozen=True, slots=True)
class RuntimeTimes:
    """transfer_timeout_s: one load, from call to answer (inf: its lease decides).
    handshake_timeout_s: first contact with a peer.
    grace_s: what the agent thread gets to fence an overdue load before it is reported in doubt.
    first_contact_s: how long a target helps a new peer's first operations along after a handshake.
    reader_help_s: the same for the reader of a hand-off that was given up. rest_s: what the operation of a load that
    was given up gets to end by itself."""

    transfer_timeout_s: float
    lease_s: float = 30.0
    max_lease_s: float = 300.0
    heartbeat_s: float = 1.0
    handshake_timeout_s: float = 5.0
    grace_s: float = 1.0
    first_contact_s: float = 3.0
    reader_help_s: float = 0.5
    rest_s: float = 2.0
    after_send_s: float = 0.02
    close_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands among the tp_size x pp_size of its worker."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size


SOLE_RANK = RankPlace()


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is to its peers. endpoint: host:port of its gRPC server. Of a rank of several: where it stands
    among them, and an incarnation of its own (`rank_incarnation`)."""

    worker: str
    role: Role
    incarnation: str
    endpoint: str
    model_fingerprint: str
    resolution: Resolution
    place: RankPlace = SOLE_RANK


@dataclass(frozen=True, slots=True)
class TransceiverParts:
    """Everything a transceiver is built from. `pools` are in `memory` when the implementation asked for one, and
    outlive the transceiver."""

    identity: WorkerIdentity
    pools: Sequence[KVPool]
    times: RuntimeTimes
    memory: PoolMemory | None
    nixl_plugin: str = "UCX"


@dataclass(frozen=True, slots=True)
class Implementation:
    """build: a running transceiver; raises ConfigError naming the setting at fault. memory: makes what pools are
    allocated from; None when any host memory will do."""

    build: Callable[[TransceiverParts], Transceiver]
    memory: Callable[[], PoolMemory] | None = None
