"""A worker's membership in the router's pool: it joins, reports once a second, and makes first contact with peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc

from kvferry.cluster.worker_service import PeerBook, StatusSource
from kvferry.core import KVFerryError
from kvferry.proto import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
RETRY_MAX_S = 2.0
RETRY_FIRST_S = 0.2
PEER_RETRY_S = 5.0

Connect = Callable[[str], None]
"""First contact with the peer at an endpoint: blocking, bounded by its own timeout, raises KVFerryError."""


class PoolMember:
    """Keeps one worker joined until cancelled. The router may restart: it is joined again as soon as it answers.

    connect None: this worker pulls from nobody (prefill and aggregated workers).
    """

    def __init__(self, router_endpoint: str, source: StatusSource, peers: PeerBook, connect: Connect | None) -> None:
        self._router_endpoint = router_endpoint
        self._source = source
        self._peers = peers
        self._connect = connect
        self._changed = asyncio.Event()
        self._contacts: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def run(self) -> None:
        pause_s = RETRY_FIRST_S
        try:
            while True:
                if await self._joined():
                    pause_s = RETRY_FIRST_S
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, pause_s * 2)
        finally:
            await self._stop_contacts(set())

    async def _joined(self) -> bool:
        """One Join stream, from its start to its end. True when the router took us in."""
        taken = False
        try:
            async with grpc.aio.insecure_channel(self._router_endpoint) as channel:
                call = worker_pb2_grpc.PoolStub(channel).Join(self._reports())
                async for view in call:
                    if not taken:
                        logger.info("joined the pool of the router at %s", self._router_endpoint)
                    taken = True
                    await self._meet(view)
            logger.warning("the router at %s ended our membership", self._router_endpoint)
        except grpc.aio.AioRpcError as error:
            log = logger.warning if taken else logger.debug
            log("no membership with the router at %s: %s", self._router_endpoint, error.details())
        return taken

    async def _reports(self) -> AsyncIterator[worker_pb2.WorkerReport]:
        while True:
            self._changed.clear()
            yield await self._source.report()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), REPORT_INTERVAL_S)

    async def _meet(self, view: worker_pb2.PoolView) -> None:
        """Starts first contact with every new peer and forgets those that are gone."""
        if self._connect is None:
            return
        wanted = {(peer.endpoint, peer.incarnation) for peer in view.prefill}
        await self._stop_contacts(wanted)
        for key in wanted - self._contacts.keys():
            self._contacts[key] = asyncio.create_task(self._contact(key[0]))

    async def _stop_contacts(self, wanted: set[tuple[str, str]]) -> None:
        for key in self._contacts.keys() - wanted:
            self._contacts.pop(key).cancel()
            self._peers.ready.discard(key[0])
            self._peers.errors.pop(key[0], None)

    async def _contact(self, endpoint: str) -> None:
        """Tries until it works: a peer that is still starting, or refuses for now, may be fine later."""
        assert self._connect is not None
        while True:
            try:
                await asyncio.to_thread(self._connect, endpoint)
            except KVFerryError as error:
                if self._peers.errors.get(endpoint) != error.message:
                    logger.warning("cannot pair with the prefill worker at %s: %s", endpoint, error.message)
                self._peers.errors[endpoint] = error.message
            except Exception as error:
                logger.exception("first contact with %s failed", endpoint)
                self._peers.errors[endpoint] = f"internal error: {error}"
            else:
                self._peers.errors.pop(endpoint, None)
                self._peers.ready.add(endpoint)
                self._changed.set()
                logger.info("ready to pull from the prefill worker at %s", endpoint)
                return
            self._changed.set()
            await asyncio.sleep(PEER_RETRY_S)
