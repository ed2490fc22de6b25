"""A third party's transceiver: the worked example of docs/writing-a-transceiver.md.

Backend VMREAD reads and writes the memory of another process of this host with process_vm_readv(2) and
process_vm_writev(2), and notifies with datagrams. It imports nothing but kvferry's public interface.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from dataclasses import dataclass

from kvferry.core import MemRegion, TransferError
from kvferry.resolution import RuntimeCapability, TransceiverCapability
from kvferry.transceiver import (
    Agent,
    CompletedOperation,
    CopyArray,
    Direction,
    Implementation,
    Operation,
    Transceiver,
    TransceiverParts,
    python_transceiver,
)

CAPABILITY = TransceiverCapability(
    "VMREAD",
    runtimes=(
        RuntimeCapability(
            "PYTHON", ("V1", "V2"), needs_finite_timeout=True, implementation="kvferry_vmread:IMPLEMENTATION"
        ),
    ),
)

Regions = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Peer:
    pid: int
    port: int
    regions: Regions


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class VmReadAgent(Agent):
    """Copies are complete when `submit` returns, so `fence` has only to forget the peer."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._regions: Regions = []
        self._peers: dict[str, _Peer] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mailbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._mailbox.bind(("127.0.0.1", 0))
        self._port = self._mailbox.getsockname()[1]
        self._mailbox.setblocking(False)

    @property
    def writes_land(self) -> bool:
        return True

    def register(self, region: MemRegion) -> None:
        self._regions.append((region.addr, region.nbytes))

    def deregister(self, region: MemRegion) -> None:
        try:
            self._regions.remove((region.addr, region.nbytes))
        except ValueError:
            raise TransferError(f"{region} is not registered") from None

    def metadata(self) -> bytes:
        return json.dumps([self._incarnation, os.getpid(), self._port, self._regions]).encode()

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        try:
            name, pid, port, regions = json.loads(metadata)
            peer = _Peer(int(pid), int(port), [(int(addr), int(nbytes)) for addr, nbytes in regions])
        except (ValueError, TypeError) as error:
            raise TransferError(f"the metadata of {incarnation} is malformed: {error}") from None
        if name != incarnation:
            raise TransferError(f"the metadata of {incarnation} describes {name!r}")
        self._peers[incarnation] = peer

    def forget_peer(self, incarnation: str) -> None:
        self._peers.pop(incarnation, None)

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        known = self._known(peer)
        rows = copies.tolist()
        for local, remote, nbytes in rows:
            _check_inside(self._regions, local, nbytes)
            _check_inside(known.regions, remote, nbytes)
        for local, remote, nbytes in rows:
            self._copy(direction, known.pid, local, remote, nbytes)
        return CompletedOperation()

    def notify(self, peer: str, message: bytes) -> None:
        port = self._known(peer).port
        try:
            self._mailbox.sendto(self._incarnation.encode() + b"\0" + message, ("127.0.0.1", port))
        except OSError as error:
            raise TransferError(f"{peer} cannot be notified: {error}") from None

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        arrived = []
        while True:
            try:
                sender, _, message = self._mailbox.recv(1 << 16).partition(b"\0")
            except OSError:  # nothing left, or closed
                return arrived
            arrived.append((sender.decode(errors="replace"), message))

    def fence(self, peer: str) -> None:
        self.forget_peer(peer)

    def close(self) -> None:
        self._peers.clear()
        self._mailbox.close()

    def _known(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferError(f"peer {peer} is not known")
        return self._peers[peer]

    def _copy(self, direction: Direction, pid: int, local: int, remote: int, nbytes: int) -> None:
        call = self._libc.process_vm_readv if direction is Direction.READ else self._libc.process_vm_writev
        done = 0
        while done < nbytes:
            here, there = _Vector(local + done, nbytes - done), _Vector(remote + done, nbytes - done)
            moved = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if moved <= 0:
                raise TransferError(f"{call.__name__}: {os.strerror(ctypes.get_errno())}")
            done += moved


def _check_inside(regions: Regions, addr: int, nbytes: int) -> None:
    if not any(start <= addr and addr + nbytes <= start + size for start, size in regions):
        raise TransferError(f"{nbytes} bytes at {addr:#x} are not registered")


def _build(parts: TransceiverParts) -> Transceiver:
    if sys.platform != "linux":
        raise TransferError("VMREAD needs Linux", field="transceiver.backend")
    return python_transceiver(VmReadAgent(parts.identity.incarnation), parts)


IMPLEMENTATION = Implementation(_build)
