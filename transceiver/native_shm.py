"""SHM over the C++ engine: Python meets the peers, C++ copies and exchanges notifications."""

from __future__ import annotations

import logging
import os
import socket

from kvferry.core import MemRegion
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.native.engine import Backend, BackendError, MemoryBackend
from kvferry.transceiver.native_agent import CALL_TIMEOUT_S, NativeAgent, guard
from kvferry.transceiver.shm_host import MappedPeer, ShmHost

logger = logging.getLogger(__name__)


class NativeShmAgent(NativeAgent):
    """As `ShmAgent`. engine_backend: what the engine drives when it is not `memory` itself but wraps it."""

    def __init__(
        self, incarnation: str, arena: SharedArena, memory: MemoryBackend, engine_backend: Backend | None = None
    ) -> None:
        super().__init__(engine_backend or memory)
        self._memory = memory
        self._peers: dict[str, MappedPeer] = {}
        self._host = ShmHost(incarnation, arena, self._take_mailbox)

    def register(self, region: MemRegion) -> None:
        super().register(region)
        self._host.share(region)

    def deregister(self, region: MemRegion) -> None:
        self._host.unshare(region)
        super().deregister(region)

    def metadata(self) -> bytes:
        return self._host.metadata()

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        """Peers that have died are let go: a mapping keeps the memory of a process that is gone."""
        gone = [name for name, peer in self._peers.items() if not peer.line.alive]
        for name in {*gone, incarnation}:
            self.forget_peer(name)
        peer = self._host.meet(incarnation, metadata)
        self._peers[incarnation] = peer  # first: should the engine answer too late, it still stays mapped
        line = os.dup(peer.line.socket.fileno())
        guard(lambda: self._memory.add_peer(self.engine, incarnation, peer.regions, line, CALL_TIMEOUT_S))

    def forget_peer(self, incarnation: str) -> None:
        super().forget_peer(incarnation)
        self._unmap(incarnation)

    def fence(self, peer: str) -> None:
        super().fence(peer)
        self._unmap(peer)

    def close(self) -> None:
        self._host.close()
        super().close()
        for incarnation in list(self._peers):
            self._unmap(incarnation)

    def _unmap(self, incarnation: str) -> None:
        """Once the engine has forgotten the peer: no copy of it is running then."""
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            peer.close()

    def _take_mailbox(self, peer: str, connection: socket.socket) -> None:
        try:
            self._memory.add_mailbox(self.engine, peer, connection.detach(), CALL_TIMEOUT_S)
        except BackendError as error:
            logger.warning("SHM: cannot take notifications of %s: %s", peer, error)
