"""The SHM agent: pools in shared memory, copied from or to with one memcpy per run. Same host only.

Reading does not need the peer's help: a peer that is stopped is read all the same, and one that has died is
noticed by its socket. Copies are complete when `submit` returns, so a fence has nothing to wait for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.base import Agent, CompletedOperation, CopyArray, Direction, Operation
from kvferry.transceiver.memcopy import copy_runs
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.shm_host import MappedPeer, ShmHost

_Addresses = npt.NDArray[np.uint64]


class RegionTable:
    """Registered address ranges, and where each is mapped in this process."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], int] = {}
        self._rebuild()

    def add(self, addr: int, nbytes: int, mapped: int) -> None:
        self._mapped[addr, nbytes] = mapped
        self._rebuild()

    def remove(self, addr: int, nbytes: int) -> bool:
        found = self._mapped.pop((addr, nbytes), None) is not None
        self._rebuild()
        return found

    def translate(self, addresses: _Addresses, nbytes: _Addresses, whose: str) -> _Addresses:
        """Local addresses of the given ranges; TransferError when one is not wholly inside a registered region."""
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = index >= 0
        if inside.all():
            sizes, offsets = self._sizes[index], addresses - self._starts[index]
            inside = (nbytes <= sizes) & (offsets <= sizes - np.minimum(nbytes, sizes))
        if not inside.all():
            bad = int(np.flatnonzero(~inside)[0])
            raise TransferError(f"{int(nbytes[bad])} bytes at {int(addresses[bad]):#x} are not registered {whose}")
        mapped: _Addresses = self._bases[index] + offsets
        return mapped

    def _rebuild(self) -> None:
        rows = sorted((addr, nbytes, mapped) for (addr, nbytes), mapped in self._mapped.items())
        columns = np.asarray(rows, dtype=np.uint64).reshape(-1, 3)
        self._starts, self._sizes, self._bases = columns[:, 0], columns[:, 1], columns[:, 2]


class ShmAgent(Agent):
    """Peers reach what was registered out of `arena`; other registered memory is only ever a local end."""

    def __init__(self, incarnation: str, arena: SharedArena) -> None:
        self._host = ShmHost(incarnation, arena)
        self._local = RegionTable()
        self._peers: dict[str, tuple[MappedPeer, RegionTable]] = {}

    @property
    def writes_land(self) -> bool:
        return True

    def register(self, region: MemRegion) -> None:
        if region.device != "cpu":
            raise TransferError(f"the SHM agent moves host memory, not {region.device}", field="transceiver.backend")
        self._local.add(region.addr, region.nbytes, region.addr)
        self._host.share(region)

    def deregister(self, region: MemRegion) -> None:
        self._host.unshare(region)
        if not self._local.remove(region.addr, region.nbytes):
            raise TransferError(f"{region} is not registered")

    def metadata(self) -> bytes:
        return self._host.metadata()

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        """Peers that have died are let go: a mapping keeps the memory of a process that is gone."""
        gone = [name for name, (peer, _) in self._peers.items() if not peer.line.alive]
        for name in {*gone, incarnation}:
            self.forget_peer(name)
        peer, regions = self._host.meet(incarnation, metadata), RegionTable()
        for addr, nbytes, mapped in peer.regions:
            regions.add(addr, nbytes, mapped)
        self._peers[incarnation] = peer, regions

    def forget_peer(self, incarnation: str) -> None:
        known = self._peers.pop(incarnation, None)
        if known is not None:
            known[0].close()

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        _, regions = self._reach(peer)
        nbytes = copies[:, 2]
        here = self._local.translate(copies[:, 0], nbytes, "here")
        there = regions.translate(copies[:, 1], nbytes, f"with {peer}")
        ends = (here, there) if direction is Direction.READ else (there, here)
        copy_runs(np.stack([*ends, nbytes], axis=1))
        return CompletedOperation()

    def notify(self, peer: str, message: bytes) -> None:
        self._reach(peer)[0].line.send(message)

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        return self._host.listener.drain()

    def fence(self, peer: str) -> None:
        self.forget_peer(peer)

    def close(self) -> None:
        for incarnation in list(self._peers):
            self.forget_peer(incarnation)
        self._host.close()

    def _reach(self, peer: str) -> tuple[MappedPeer, RegionTable]:
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"peer {peer} is not known to the SHM agent")
        if not known[0].line.alive:
            self.forget_peer(peer)
            raise TransferError(f"peer {peer} is gone")
        return known
