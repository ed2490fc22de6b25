"""``kvferry.v1.Admin``: what operators ask."""

from __future__ import annotations

import json
import os

from kvferry.core import InternalError, InvalidRequestError, KVFerryError, cache_codec, codec
from kvferry.proto import admin_pb2, admin_pb2_grpc
from kvferry.resolution import ResolveRequest, example_config, original_architecture, probe_libraries, resolve
from kvferry.router.driver import Driver
from kvferry.router.failures import Context, failures_answered
from kvferry.router.ledger import Ledger
from kvferry.router.pool import Member, WorkerPool
from kvferry.router.worker_client import LegError, WorkerClients

_DRAIN_TIMEOUT_S = 5.0
_SWITCH = {"": None, "on": True, "off": False}


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(
        self, model_name: str, endpoint: str, pool: WorkerPool, clients: WorkerClients, driver: Driver, ledger: Ledger
    ) -> None:
        self._model_name = model_name
        self._endpoint = endpoint
        self._pool = pool
        self._clients = clients
        self._driver = driver
        self._ledger = ledger

    async def Status(  # noqa: N802 - the name of the RPC
        self, wire: admin_pb2.StatusRequest, context: Context
    ) -> admin_pb2.StatusResponse:
        router = admin_pb2.RouterStatus(
            endpoint=self._endpoint,
            pid=os.getpid(),
            model=self._model_name,
            requests=self._ledger.counts,
            queue_depth=self._driver.queue_depth,
        )
        return admin_pb2.StatusResponse(
            workers=[worker_status(member) for member in self._pool.members()], router=router
        )

    async def Drain(  # noqa: N802 - the name of the RPC
        self, wire: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        """From now on the worker gets nothing new, also if it does not answer us."""
        async with failures_answered(context, f"drain {wire.worker}"):
            facts = self._pool.drain(wire.worker)
            with self._pool.lease(facts.name, 0) as lease:
                try:
                    await self._clients.drain(lease, _DRAIN_TIMEOUT_S)
                except LegError as failure:
                    raise failure.error from None
            return admin_pb2.DrainResponse(state="draining")

    async def Resolve(  # noqa: N802 - the name of the RPC
        self, wire: admin_pb2.ResolveRequest, context: Context
    ) -> admin_pb2.ResolveResponse:
        """A refusal is an answer: `error` says which setting to change."""
        async with failures_answered(context, "resolve"):
            try:
                resolution = resolve(_resolve_request(wire))
            except InternalError:
                raise
            except KVFerryError as error:
                return admin_pb2.ResolveResponse(error=error.message)
            return admin_pb2.ResolveResponse(resolution=codec.resolution_to_wire(resolution))


def worker_status(member: Member) -> admin_pb2.WorkerStatus:
    facts = member.facts
    return admin_pb2.WorkerStatus(
        name=facts.name,
        role=facts.role.value,
        state=member.state.value,
        state_reason=member.reason,
        pid=facts.pid,
        incarnation=facts.incarnation,
        endpoint=facts.endpoint,
        resolution=codec.resolution_to_wire(facts.resolution),
        blocks=codec.blocks_to_wire(facts.blocks),
        requests=facts.requests,
        cache=cache_codec.statistics_to_wire(facts.cache),
        tiers=[cache_codec.tier_to_wire(tier) for tier in facts.tiers],
        model=facts.model,
        kv_cache_core=facts.kv_cache_core,
        max_batch=facts.max_batch,
        peers=sorted(facts.peers_ready),
        peer_errors=facts.peer_errors,
        ranks=[codec.rank_process_to_wire(rank) for rank in facts.ranks],
    )


def _resolve_request(wire: admin_pb2.ResolveRequest) -> ResolveRequest:
    if wire.config_json:
        try:
            config = json.loads(wire.config_json)
        except ValueError as error:
            raise InvalidRequestError(f"config_json is not JSON: {error}", field="config_json") from None
        if not isinstance(config, dict):
            raise InvalidRequestError("config_json must hold a JSON object", field="config_json")
    else:
        config = example_config(wire.architecture)
    if wire.prefix_reuse not in _SWITCH:
        raise InvalidRequestError(
            f"prefix_reuse must be on, off or empty, got {wire.prefix_reuse!r}", field="prefix_reuse"
        )
    unset = ResolveRequest(architecture="")
    timeout_ms = wire.transfer_timeout_ms if wire.HasField("transfer_timeout_ms") else unset.transfer_timeout_ms
    backend = wire.backend or unset.backend
    return ResolveRequest(
        architecture=wire.architecture or original_architecture(config),
        config=config,
        backend=backend,
        runtime=wire.runtime or unset.runtime,
        manager=wire.manager or unset.manager,
        transfer_timeout_ms=None if wire.no_transfer_timeout else timeout_ms,
        beam_width=wire.beam_width or unset.beam_width,
        kv_connector=wire.kv_connector or None,
        speculative=wire.speculative or None,
        prefix_reuse=_SWITCH[wire.prefix_reuse],
        missing_libraries=probe_libraries(backend),
    )
