"""Meeting the SHM agents of one host: who they are, and their memory mapped into this process."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.host_identity import HostIdentity, this_host
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.shm_socket import ShmLine, ShmListener

_VERSION = 1


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


class MappedPeer:
    """A peer's memory, mapped here, and the line to it. regions: (address there, bytes, address here)."""

    def __init__(self, metadata: ShmMetadata, line: ShmLine) -> None:
        self.line = line
        self.regions: list[tuple[int, int, int]] = []
        self._mappings: list[mmap.mmap] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._map(metadata, line.take_fds())
            undo.pop_all()

    def close(self) -> None:
        """Only once nothing copies from or to it any more."""
        self.line.close()
        for mapping in self._mappings:
            mapping.close()

    def _map(self, metadata: ShmMetadata, fds: list[int]) -> None:
        try:
            for fd in fds:
                # Pages are there already; populating the table now keeps faults out of the first request.
                self._mappings.append(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        except (OSError, ValueError) as error:
            raise TransferError(f"the memory of {metadata.incarnation} cannot be mapped: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)
        bases = [np.frombuffer(mapping, dtype=np.uint8).ctypes.data for mapping in self._mappings]
        for addr, nbytes, index, offset in metadata.regions:
            if index >= len(bases) or offset + nbytes > len(self._mappings[index]):
                raise TransferError(f"{metadata.incarnation} describes memory that it did not share")
            self.regions.append((addr, nbytes, bases[index] + offset))


class ShmHost:
    """This process among the SHM agents of its host: what it shares out of `arena`, and where it can be called."""

    def __init__(
        self,
        incarnation: str,
        arena: SharedArena,
        hand_over: Callable[[str, socket.socket], None] | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._arena = arena
        self._shared: dict[MemRegion, tuple[int, int, int, int]] = {}
        self._identity = this_host()
        self.listener = ShmListener(incarnation, lambda: [segment.fd for segment in arena.segments], hand_over)

    def share(self, region: MemRegion) -> None:
        """Peers that are met from now on can reach `region`, if it lies in the arena."""
        segment = self._arena.segment_of(region)
        if segment is not None:
            index = self._arena.segments.index(segment)
            self._shared[region] = (region.addr, region.nbytes, index, region.addr - segment.region.addr)

    def unshare(self, region: MemRegion) -> None:
        self._shared.pop(region, None)

    def metadata(self) -> bytes:
        regions = tuple(self._shared.values())
        return ShmMetadata(self._incarnation, self._identity, self.listener.address, regions).encode()

    def meet(self, incarnation: str, metadata: bytes) -> MappedPeer:
        """Blocking, bounded. Raises TransferError, which names the other host when it is one."""
        told = ShmMetadata.decode(metadata)
        if told.incarnation != incarnation:
            raise TransferError(f"the SHM metadata of {incarnation} describes {told.incarnation!r}")
        if told.host.boot_id != self._identity.boot_id:
            raise TransferError(
                f"backend SHM needs both workers on one host: {incarnation} is on {told.host.hostname}, this one on "
                f"{self._identity.hostname}; set transceiver.backend to NIXL",
                field="transceiver.backend",
            )
        return MappedPeer(told, ShmLine(self._incarnation, told.address))

    def close(self) -> None:
        self.listener.close()
