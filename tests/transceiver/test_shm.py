"""What only the SHM agent does: one host, one user, peers that vanish or overreach."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.base import Agent, Direction
from kvferry.transceiver.host_identity import HostIdentity
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.native.engine import MemoryBackend
from kvferry.transceiver.native_shm import NativeShmAgent
from kvferry.transceiver.shm import RegionTable, ShmAgent
from kvferry.transceiver.shm_host import ShmMetadata

Eventually = Callable[..., None]


class Pair:
    """near knows far; each has a page of its own arena."""

    def __init__(self) -> None:
        self.arenas = SharedArena(), SharedArena()
        self.near, self.far = ShmAgent("near", self.arenas[0]), ShmAgent("far", self.arenas[1])
        self.local, self.remote = (arena.allocate(4096).numpy() for arena in self.arenas)
        for agent, array in ((self.near, self.local), (self.far, self.remote)):
            agent.register(MemRegion(array.ctypes.data, array.nbytes))
        self.near.load_peer("far", self.far.metadata())

    def read(self, nbytes: int = 64, offset: int = 0) -> None:
        row = [self.local.ctypes.data, self.remote.ctypes.data + offset, nbytes]
        self.near.submit(Direction.READ, "far", np.asarray([row], dtype=np.uint64))

    def close(self) -> None:
        for end in (self.near, self.far, *self.arenas):
            end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_another_host_is_refused_by_name(pair: Pair) -> None:
    there = replace(ShmMetadata.decode(pair.far.metadata()), host=HostIdentity("another-boot", "host-b"))
    with pytest.raises(TransferError, match=r"far is on host-b, .*set transceiver\.backend to NIXL") as caught:
        pair.near.load_peer("far", there.encode())
    assert caught.value.field == "transceiver.backend"
    with pytest.raises(TransferError, match="not known"):
        pair.read()


def test_memory_the_peer_did_not_share_is_refused(pair: Pair) -> None:
    told = ShmMetadata.decode(pair.far.metadata())
    addr, _, index, offset = told.regions[0]
    for region in ((addr, 1 << 40, index, offset), (addr, 4096, 7, offset), (addr, 4096, index, 1 << 60)):
        with pytest.raises(TransferError, match="did not share"):
            pair.near.load_peer("far", replace(told, regions=(region,)).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: [2, *fields[1:]],
        lambda fields: fields[:-1],
        lambda fields: [*fields[:-1], [[1, 2, 3]]],
        lambda fields: [*fields[:-1], [[-1, 2, 3, 4]]],
        lambda fields: [*fields[:-1], 5],
        lambda fields: {"a": 1},
    ],
)
def test_malformed_metadata_is_refused(pair: Pair, change: Callable[[list[object]], object]) -> None:
    with pytest.raises(TransferError, match="malformed"):
        pair.near.load_peer("far", json.dumps(change(json.loads(pair.far.metadata()))).encode())


def test_addresses_that_wrap_around_are_outside(pair: Pair) -> None:
    for nbytes, offset in ((2**64 - 1, 64), (4097, 0), (64, 4090)):
        with pytest.raises(TransferError, match="not registered"):
            pair.read(nbytes, offset)


def test_a_peer_that_is_gone_is_noticed(pair: Pair) -> None:
    pair.read()
    pair.far.close()
    with pytest.raises(TransferError, match="far is gone"):
        pair.read()
    with pytest.raises(TransferError, match="far is not known"):  # and let go of
        pair.near.notify("far", b"hello")


@pytest.mark.parametrize("make", [ShmAgent, lambda name, arena: NativeShmAgent(name, arena, MemoryBackend())])
def test_the_memory_of_a_dead_peer_is_let_go_when_another_is_met(make: Callable[[str, SharedArena], Agent]) -> None:
    """Or each worker that is killed would cost every reader its pools."""
    arenas = [SharedArena() for _ in range(3)]
    near, dying, reborn = (make(name, arena) for name, arena in zip(("near", "far-1", "far-2"), arenas, strict=True))
    for agent, arena in ((dying, arenas[1]), (reborn, arenas[2])):
        agent.register(MemRegion(arena.allocate(1 << 20).data_ptr(), 1 << 20))
    near.load_peer("far-1", dying.metadata())
    dying.close()
    arenas[1].close()
    before = _mappings()
    near.load_peer("far-2", reborn.metadata())
    assert _mappings() == before  # one came, one went
    for end in (near, reborn, *arenas):
        end.close()


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-pool")


def test_a_peer_that_never_reads_its_mail_costs_an_error_and_no_wait(pair: Pair) -> None:
    def write_for_ever() -> None:
        for _ in range(200_000):
            pair.near.notify("far", b"x" * 64)

    with pytest.raises(TransferError):
        write_for_ever()


def test_whoever_does_not_speak_the_protocol_is_hung_up_on(pair: Pair) -> None:
    address = ShmMetadata.decode(pair.far.metadata()).address
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(5)
        stranger.connect("\0" + address)
        stranger.send(b"GET / HTTP/1.1")
        assert stranger.recv(64) == b""
    pair.read()
    pair.near.notify("far", b"still here")
    deadline_s = time.monotonic() + 5
    while not (arrived := pair.far.drain_notifications()):
        assert time.monotonic() < deadline_s
    assert arrived == [("near", b"still here")]


def test_closing_leaves_no_file_open(eventually: Eventually) -> None:
    before = set(os.listdir("/proc/self/fd"))
    pair = Pair()
    pair.read()
    pair.close()
    del pair  # pools keep their own mapping
    eventually(lambda: set(os.listdir("/proc/self/fd")) == before)


def test_region_table_translates_many_at_once() -> None:
    table = RegionTable()
    table.add(1000, 100, 5_000_000)
    table.add(2000, 50, 6_000_000)
    addresses = np.asarray([1000, 2049, 1099, 2000], dtype=np.uint64)
    sizes = np.asarray([100, 1, 1, 50], dtype=np.uint64)
    assert table.translate(addresses, sizes, "here").tolist() == [5_000_000, 6_000_049, 5_000_099, 6_000_000]
    assert table.remove(2000, 50)
    assert not table.remove(2000, 50)
    with pytest.raises(TransferError, match="0x7d0 are not registered here"):
        table.translate(addresses[3:], sizes[3:], "here")
    with pytest.raises(TransferError):
        RegionTable().translate(addresses[:1], sizes[:1], "here")
