"""The SHM agent: pools in shared memory, copied from or to with one memcpy per run. Same host only.

Reading does not need the peer's help: a peer that is stopped is read all the same, and one that has died is
noticed by its socket. Copies are complete when `submit` returns, so a fence has nothing to wait for.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.base import Agent, CompletedOperation, CopyArray, Direction, Operation
from kvferry.transceiver.host_identity import HostIdentity, this_host
from kvferry.transceiver.memcopy import copy_runs
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.shm_socket import ShmLine, ShmListener

_VERSION = 1
_Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ShmMetadata:
    """How to reach an agent. regions: (address there, bytes, index of the memory file, offset in it)."""

    incarnation: str
    host: HostIdentity
    address: str
    regions: tuple[tuple[int, int, int, int], ...]

    def encode(self) -> bytes:
        fields = [self.incarnation, self.host.boot_id, self.host.hostname, self.address, self.regions]
        return json.dumps([_VERSION, *fields]).encode()

    @staticmethod
    def decode(data: bytes) -> ShmMetadata:
        """Raises TransferError for anything an agent of this version does not send."""
        try:
            version, incarnation, boot_id, hostname, address, regions = json.loads(data)
            if version != _VERSION:
                raise ValueError(f"version {version}")
            checked = tuple((int(a), int(n), int(i), int(o)) for a, n, i, o in regions)
            if any(value < 0 for region in checked for value in region):
                raise ValueError("a negative size")
            return ShmMetadata(str(incarnation), HostIdentity(str(boot_id), str(hostname)), str(address), checked)
        except (ValueError, TypeError, RecursionError) as error:
            raise TransferError(f"the peer's SHM metadata is malformed: {error}") from None


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


class _Peer:
    """A peer's memory, mapped here, and the line to it."""

    def __init__(self, metadata: ShmMetadata, line: ShmLine) -> None:
        self.line = line
        self.regions = RegionTable()
        self._mappings: list[mmap.mmap] = []
        fds = line.take_fds()
        try:
            for fd in fds:
                # Pages are there already; populating the table now keeps faults out of the first request.
                self._mappings.append(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
            bases = [np.frombuffer(mapping, dtype=np.uint8).ctypes.data for mapping in self._mappings]
            for addr, nbytes, index, offset in metadata.regions:
                if index >= len(fds) or offset + nbytes > len(self._mappings[index]):
                    raise TransferError(f"{metadata.incarnation} describes memory that it did not share")
                self.regions.add(addr, nbytes, bases[index] + offset)
        except (OSError, ValueError) as error:
            self.close()
            raise TransferError(f"the memory of {metadata.incarnation} cannot be mapped: {error}") from None
        except TransferError:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        self.line.close()
        for mapping in self._mappings:
            mapping.close()


class ShmAgent(Agent):
    """Peers reach what was registered out of `arena`; other registered memory is only ever a local end."""

    def __init__(self, incarnation: str, arena: SharedArena) -> None:
        self._incarnation = incarnation
        self._arena = arena
        self._shared: dict[MemRegion, tuple[int, int, int, int]] = {}
        self._local = RegionTable()
        self._peers: dict[str, _Peer] = {}
        self._host = this_host()
        self._listener = ShmListener(incarnation, lambda: [segment.fd for segment in arena.segments])

    def register(self, region: MemRegion) -> None:
        if region.device != "cpu":
            raise TransferError(f"the SHM agent moves host memory, not {region.device}", field="transceiver.backend")
        self._local.add(region.addr, region.nbytes, region.addr)
        segment = self._arena.segment_of(region)
        if segment is not None:
            index = self._arena.segments.index(segment)
            self._shared[region] = (region.addr, region.nbytes, index, region.addr - segment.region.addr)

    def deregister(self, region: MemRegion) -> None:
        self._shared.pop(region, None)
        if not self._local.remove(region.addr, region.nbytes):
            raise TransferError(f"{region} is not registered")

    def metadata(self) -> bytes:
        regions = tuple(self._shared.values())
        return ShmMetadata(self._incarnation, self._host, self._listener.address, regions).encode()

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        self.forget_peer(incarnation)
        told = ShmMetadata.decode(metadata)
        if told.incarnation != incarnation:
            raise TransferError(f"the SHM metadata of {incarnation} describes {told.incarnation!r}")
        if told.host.boot_id != self._host.boot_id:
            raise TransferError(
                f"backend SHM needs both workers on one host: {incarnation} is on {told.host.hostname}, this one on "
                f"{self._host.hostname}; set transceiver.backend to NIXL",
                field="transceiver.backend",
            )
        self._peers[incarnation] = _Peer(told, ShmLine(self._incarnation, told.address))

    def forget_peer(self, incarnation: str) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            peer.close()

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        reached = self._reach(peer)
        nbytes = copies[:, 2]
        here = self._local.translate(copies[:, 0], nbytes, "here")
        there = reached.regions.translate(copies[:, 1], nbytes, f"with {peer}")
        ends = (here, there) if direction is Direction.READ else (there, here)
        copy_runs(np.stack([*ends, nbytes], axis=1))
        return CompletedOperation()

    def notify(self, peer: str, message: bytes) -> None:
        self._reach(peer).line.send(message)

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        return self._listener.drain()

    def fence(self, peer: str) -> None:
        self.forget_peer(peer)

    def close(self) -> None:
        for incarnation in list(self._peers):
            self.forget_peer(incarnation)
        self._listener.close()

    def _reach(self, peer: str) -> _Peer:
        reached = self._peers.get(peer)
        if reached is None:
            raise TransferError(f"peer {peer} is not known to the SHM agent")
        if not reached.line.alive:
            raise TransferError(f"peer {peer} is gone")
        return reached
