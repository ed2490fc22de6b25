"""An agent that copies memory within one process: the reference for what the agent ABI means, and fast tests.

Agents find each other by incarnation through a `LoopbackFabric`, which stands for the network.
"""

from __future__ import annotations

import ctypes
from collections import deque

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.base import Agent, CompletedOperation, CopyArray, Direction, Operation


class LoopbackFabric:
    """The agents that can reach one another."""

    def __init__(self) -> None:
        self.agents: dict[str, LoopbackAgent] = {}


class LoopbackAgent(Agent):
    """Every operation is complete when `submit` returns. Memory must be registered on both sides."""

    def __init__(self, incarnation: str, fabric: LoopbackFabric) -> None:
        self._incarnation = incarnation
        self._fabric = fabric
        self._regions: list[MemRegion] = []
        self._peers: set[str] = set()
        self._inbox: deque[tuple[str, bytes]] = deque()
        fabric.agents[incarnation] = self

    @property
    def writes_land(self) -> bool:
        return True

    def register(self, region: MemRegion) -> None:
        self._regions.append(region)

    def deregister(self, region: MemRegion) -> None:
        if region not in self._regions:
            raise TransferError(f"{region} is not registered")
        self._regions.remove(region)

    def metadata(self) -> bytes:
        return b"loopback:" + self._incarnation.encode()

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        if metadata != b"loopback:" + incarnation.encode():
            raise TransferError(f"the metadata of {incarnation} is malformed")
        self._peers.add(incarnation)

    def forget_peer(self, incarnation: str) -> None:
        self._peers.discard(incarnation)

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        remote = self._reach(peer)
        for local_addr, remote_addr, nbytes in copies.tolist():
            self._check(local_addr, nbytes)
            remote._check(remote_addr, nbytes)
        for local_addr, remote_addr, nbytes in copies.tolist():
            pair = (local_addr, remote_addr) if direction is Direction.READ else (remote_addr, local_addr)
            ctypes.memmove(*pair, nbytes)
        return CompletedOperation()

    def notify(self, peer: str, message: bytes) -> None:
        self._reach(peer)._inbox.append((self._incarnation, message))

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def fence(self, peer: str) -> None:
        self._peers.discard(peer)

    def close(self) -> None:
        self._fabric.agents.pop(self._incarnation, None)
        self._regions.clear()

    def _reach(self, peer: str) -> LoopbackAgent:
        remote = self._fabric.agents.get(peer)
        if peer not in self._peers or remote is None:
            raise TransferError(f"peer {peer} is not reachable")
        return remote

    def _check(self, addr: int, nbytes: int) -> None:
        for region in self._regions:
            if region.addr <= addr and addr + nbytes <= region.addr + region.nbytes:
                return
        raise TransferError(f"{nbytes} bytes at {addr:#x} are not registered with {self._incarnation}")
