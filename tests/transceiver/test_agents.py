"""One contract for every agent: what the runtime may rely on."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from libraries import needs_mooncake

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.base import Agent, CopyArray, Direction, Operation, OpState
from kvferry.transceiver.faulty import FaultyAgent
from kvferry.transceiver.loopback import LoopbackAgent, LoopbackFabric
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.mooncake import MooncakeAgent
from kvferry.transceiver.native.engine import MemoryBackend
from kvferry.transceiver.native_agent import NativeAgent
from kvferry.transceiver.native_shm import NativeShmAgent
from kvferry.transceiver.nixl import NixlAgent
from kvferry.transceiver.nixl_library import nixl_backend
from kvferry.transceiver.shm import ShmAgent
from kvferry.transceiver.ucx_library import ucx_backend

Make = Callable[[str], Agent]


AGENTS = [
    "loopback",
    "nixl",
    "faulty-nixl",
    "shm",
    "third-party",
    "native-nixl",
    "native-shm",
    "native-ucx",
    pytest.param("mooncake", marks=needs_mooncake),
]

ARENA = SharedArena()
"""All memory of these tests: every agent must be able to use it, and SHM can use no other."""


@pytest.fixture(params=AGENTS)
def make(request: pytest.FixtureRequest) -> Make:
    fabric = LoopbackFabric()
    return {
        "loopback": lambda name: LoopbackAgent(name, fabric),
        "nixl": lambda name: NixlAgent(name),
        "faulty-nixl": lambda name: FaultyAgent(NixlAgent(name)),
        "shm": lambda name: ShmAgent(name, ARENA),
        "third-party": third_party,
        "native-nixl": lambda name: attentive(NativeAgent(nixl_backend(name))),
        "native-shm": lambda name: attentive(NativeShmAgent(name, ARENA, MemoryBackend())),
        "native-ucx": lambda name: attentive(NativeAgent(ucx_backend(name))),
        "mooncake": lambda name: MooncakeAgent(name),
    }[request.param]


def attentive(agent: NativeAgent) -> Agent:
    """The runtime tells the engine when to look for notifications; here it is always."""
    agent.engine.expect(0.0, 3600.0)
    return agent


def third_party(name: str) -> Agent:
    """The worked example of the manual: it must keep the contract like any other."""
    path = Path(__file__).parents[1] / "support" / "vmread" / "kvferry_vmread.py"
    agent: Agent = runpy.run_path(str(path))["VmReadAgent"](name)
    return agent


def memory(nbytes: int) -> np.ndarray:
    array: np.ndarray = ARENA.allocate(nbytes).numpy()
    return array


class Bench:
    """Two agents with registered memory; `near` knows `far`."""

    def __init__(self, make: Make) -> None:
        self.near, self.far = make("near"), make("far")
        self.local, self.remote = memory(4096), memory(4096)
        self.remote[:] = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
        self.near.register(region(self.local))
        self.far.register(region(self.remote))
        self.near.load_peer("far", self.far.metadata())
        self.arrived: list[tuple[str, bytes]] = []

    def copies(self, *pieces: tuple[int, int, int]) -> CopyArray:
        """(local offset, remote offset, bytes) as addresses."""
        rows = [[self.local.ctypes.data + a, self.remote.ctypes.data + b, n] for a, b, n in pieces]
        return np.asarray(rows, dtype=np.uint64)

    def finish(self, operation: Operation) -> OpState:
        """Polls to the end, with the target making progress as its own thread would."""
        deadline_s = time.monotonic() + 10
        while (state := operation.poll()) is OpState.SUBMITTED:
            assert time.monotonic() < deadline_s, "the operation never ended"
            self.drain()
        operation.release()
        return state

    def drain(self) -> None:
        self.arrived += self.far.drain_notifications()
        self.near.drain_notifications()

    def wait_for_notifications(self, count: int) -> None:
        deadline_s = time.monotonic() + 10
        while len(self.arrived) < count:
            assert time.monotonic() < deadline_s, f"{len(self.arrived)} of {count} notifications arrived"
            self.drain()


def region(array: np.ndarray) -> MemRegion:
    return MemRegion(array.ctypes.data, array.nbytes)


@pytest.fixture
def bench(make: Make) -> Iterator[Bench]:
    made = Bench(make)
    yield made
    made.near.close()
    made.far.close()


def test_read_puts_the_bytes_where_they_belong(bench: Bench) -> None:
    operation = bench.near.submit(Direction.READ, "far", bench.copies((0, 100, 50), (1000, 0, 7), (2048, 2048, 1024)))
    assert bench.finish(operation) is OpState.DONE
    expected = np.zeros(4096, dtype=np.uint8)
    expected[0:50], expected[1000:1007] = bench.remote[100:150], bench.remote[0:7]
    expected[2048:3072] = bench.remote[2048:3072]
    assert np.array_equal(bench.local, expected)


def test_write_puts_the_bytes_where_they_belong(bench: Bench) -> None:
    bench.local[:] = 7
    before = bench.remote.copy()
    assert bench.finish(bench.near.submit(Direction.WRITE, "far", bench.copies((0, 100, 50)))) is OpState.DONE
    assert (bench.remote[100:150] == 7).all()
    assert np.array_equal(bench.remote[:100], before[:100])
    assert np.array_equal(bench.remote[150:], before[150:])


def test_what_is_notified_after_a_write_finds_it(bench: Bench) -> None:
    """Where an agent promises that: what a push's DONE rests on."""
    if not bench.near.writes_land:
        assert isinstance(bench.near, MooncakeAgent)
        return
    for number in range(1, 40):
        bench.local[:] = number
        assert bench.finish(bench.near.submit(Direction.WRITE, "far", bench.copies((0, 0, 4096)))) is OpState.DONE
        bench.near.notify("far", b"written")
        bench.wait_for_notifications(number)
        assert (bench.remote == number).all()


def test_done_stays_done_and_release_may_be_repeated(bench: Bench) -> None:
    operation = bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))
    assert bench.finish(operation) is OpState.DONE
    operation.release()
    assert operation.poll() is OpState.DONE
    assert operation.error == ""


def test_notifications_arrive_once_each_with_their_sender(bench: Bench) -> None:
    messages = [bytes([number]) * (number + 1) for number in range(20)]
    for message in messages:
        bench.near.notify("far", message)
    bench.wait_for_notifications(20)
    for _ in range(50):
        bench.drain()
    assert sorted(bench.arrived) == sorted(("near", message) for message in messages)


def test_unregistered_memory_is_refused_on_both_sides(bench: Bench) -> None:
    other = memory(64)
    strange = np.asarray([[other.ctypes.data, bench.remote.ctypes.data, 64]], dtype=np.uint64)
    with pytest.raises(TransferError):
        bench.near.submit(Direction.READ, "far", strange)
    with pytest.raises(TransferError):
        bench.near.submit(Direction.READ, "far", bench.copies((0, 4090, 64)))
    assert not other.any()


def test_deregistered_memory_is_refused(bench: Bench) -> None:
    bench.near.deregister(region(bench.local))
    with pytest.raises(TransferError):
        bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))
    with pytest.raises(TransferError, match="not registered"):
        bench.near.deregister(region(bench.local))


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"\x00" * 400])
def test_metadata_that_is_garbage_is_refused(bench: Bench, metadata: bytes) -> None:
    with pytest.raises(TransferError):
        bench.near.load_peer("other", metadata)
    with pytest.raises(TransferError):
        bench.near.submit(Direction.READ, "other", bench.copies((0, 0, 64)))


def test_metadata_of_somebody_else_is_refused(bench: Bench) -> None:
    with pytest.raises(TransferError):
        bench.near.load_peer("impostor", bench.far.metadata())
    with pytest.raises(TransferError):
        bench.near.notify("impostor", b"hello")


def test_a_forgotten_peer_is_unknown_until_loaded_again(bench: Bench) -> None:
    bench.near.forget_peer("far")
    with pytest.raises(TransferError):
        bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))
    with pytest.raises(TransferError):
        bench.near.notify("far", b"hello")
    bench.near.load_peer("far", bench.far.metadata())
    assert bench.finish(bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))) is OpState.DONE


def test_after_a_fence_the_peer_is_forgotten_and_memory_stays_registered(bench: Bench) -> None:
    assert bench.finish(bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))) is OpState.DONE
    bench.near.fence("far")
    with pytest.raises(TransferError):
        bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))
    bench.near.load_peer("far", bench.far.metadata())
    assert bench.finish(bench.near.submit(Direction.READ, "far", bench.copies((64, 64, 64)))) is OpState.DONE
    assert np.array_equal(bench.local[:128], bench.remote[:128])
    bench.near.notify("far", b"still here")
    bench.wait_for_notifications(1)
    assert bench.arrived == [("near", b"still here")]


def test_other_peers_survive_a_fence(bench: Bench, make: Make) -> None:
    third = make("third")
    third.register(region(bench.remote))
    bench.near.load_peer("third", third.metadata())
    bench.near.fence("far")
    operation = bench.near.submit(Direction.READ, "third", bench.copies((0, 0, 64)))
    deadline_s = time.monotonic() + 10
    while operation.poll() is OpState.SUBMITTED:
        assert time.monotonic() < deadline_s
        third.drain_notifications()
    assert operation.poll() is OpState.DONE
    operation.release()
    third.close()


def test_a_peer_that_has_closed_is_an_error_not_a_hang(bench: Bench) -> None:
    assert bench.finish(bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))) is OpState.DONE
    bench.far.close()
    deadline_s = time.monotonic() + 10
    try:
        operation = bench.near.submit(Direction.READ, "far", bench.copies((0, 0, 64)))
    except TransferError:
        return
    while (state := operation.poll()) is OpState.SUBMITTED and time.monotonic() < deadline_s:
        bench.near.drain_notifications()
    # Within one process the memory is still there, and a backend may well read it.
    assert state is not OpState.NOT_SUBMITTED
    operation.release()


def test_device_memory_is_refused_by_name() -> None:
    agent = NixlAgent("near")
    with pytest.raises(TransferError, match="not cuda:0"):
        agent.register(MemRegion(4096, 4096, "cuda:0"))
    agent.close()
    agent.close()
