"""Workers, pools and control channels for transceiver tests, without models, managers or a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest
import torch
from libraries import needs_mooncake

from kvferry.core import (
    BlockTable,
    GroupKind,
    KVFerryError,
    KVLayout,
    PeerAddress,
    ProcessIdentity,
    RankInfo,
    Resolution,
    Role,
    Source,
    TokenRange,
    TransferError,
    new_incarnation,
    rank_incarnation,
)
from kvferry.kvcache import BlockHold, CacheStateError, KVPool
from kvferry.transceiver.base import Agent, CancelOutcome, LoadResult, PushSide
from kvferry.transceiver.control import ControlClient, ControlTarget, PushReport
from kvferry.transceiver.cpp_runtime import CppTransceiver
from kvferry.transceiver.faulty import Fault, FaultyAgent, Target
from kvferry.transceiver.implementation import RankPlace, RuntimeTimes, WorkerIdentity
from kvferry.transceiver.loopback import LoopbackAgent, LoopbackFabric
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.mooncake import MooncakeAgent
from kvferry.transceiver.native.engine import Fault as NativeFault
from kvferry.transceiver.native.engine import FaultyBackend, MemoryBackend
from kvferry.transceiver.native.engine import Target as NativeTarget
from kvferry.transceiver.native_agent import NativeAgent
from kvferry.transceiver.native_shm import NativeShmAgent
from kvferry.transceiver.nixl import NixlAgent
from kvferry.transceiver.nixl_library import nixl_backend
from kvferry.transceiver.python_runtime import PythonTransceiver
from kvferry.transceiver.ranked import PartRequest, RankedTransceiver
from kvferry.transceiver.session_runtime import SessionRuntime
from kvferry.transceiver.shm import ShmAgent
from kvferry.transceiver.ucx_library import ucx_backend

T = TypeVar("T")

WORLDS = ["loopback", "nixl", "shm", "cpp-nixl", "cpp-shm", "cpp-ucx", pytest.param("mooncake", marks=needs_mooncake)]

DIGEST = b"d" * 32
LAYOUT = KVLayout(GroupKind.FULL, layers=(0, 1), kv_heads=2, head_dim=4, tokens_per_block=4)


class FakeHold(BlockHold):
    """Counts its releases, as a manager's hold would refuse the second."""

    def __init__(self, tables: tuple[BlockTable, ...]) -> None:
        self._tables = tables
        self.released = threading.Event()

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return self._tables

    def release(self) -> None:
        if self.released.is_set():
            raise CacheStateError("a hold was released twice")
        self.released.set()


class LocalControl(ControlClient):
    """The control channel without a network: endpoints are looked up in a table shared by all workers."""

    def __init__(self, targets: dict[str, ControlTarget]) -> None:
        self.targets = targets
        self.heartbeats = 0

    def handshake(self, endpoint: str, initiator: RankInfo, timeout_s: float) -> Future[RankInfo]:
        return self._call(endpoint, lambda target: target.answer_handshake(initiator))

    def heartbeat(
        self, endpoint: str, incarnation: str, transfer_ids: Sequence[int], timeout_s: float
    ) -> Future[tuple[int, ...]]:
        self.heartbeats += 1
        return self._call(endpoint, lambda target: tuple(target.answer_heartbeat(incarnation, transfer_ids)))

    def cancel(
        self, endpoint: str, incarnation: str, transfer_id: int, nonce: bytes, timeout_s: float
    ) -> Future[CancelOutcome]:
        return self._call(endpoint, lambda target: target.answer_cancel(transfer_id, nonce))

    def open_push(
        self, endpoint: str, incarnation: str, grant: bytes, process: ProcessIdentity, timeout_s: float
    ) -> Future[bytes]:
        return self._call(endpoint, lambda target: target.answer_open_push(incarnation, grant, process))

    def check_push(
        self, endpoint: str, transfer_id: int, nonce: bytes, timeout_s: float, *, stop: bool
    ) -> Future[PushReport]:
        return self._call(endpoint, lambda target: target.answer_check_push(transfer_id, nonce, stop=stop))

    def close(self) -> None:
        pass

    def _call(self, endpoint: str, ask: Callable[[ControlTarget], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            if endpoint not in self.targets:
                raise TransferError(f"{endpoint}: connection refused")
            future.set_result(ask(self.targets[endpoint]))
        except KVFerryError as error:
            future.set_exception(error)
        return future


@dataclass(slots=True)
class Load:
    """A load under test: every result it reported, and a way to wait for the first."""

    results: list[LoadResult] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    load_id: int = 0

    def on_done(self, result: LoadResult) -> None:
        self.results.append(result)
        self.done.set()

    def wait(self, timeout_s: float = 10.0) -> LoadResult:
        assert self.done.wait(timeout_s), "the load never ended"
        return self.results[0]


class NativeFaults:
    """The C++ engine's faulty backend, commanded as a `FaultyAgent` is."""

    def __init__(self, backend: FaultyBackend) -> None:
        self._backend = backend

    def inject(
        self, fault: Fault, target: Target = Target.OPERATION, *, skip: int = 0, count: int = 1, delay_s: float = 0.0
    ) -> None:
        self._backend.inject(NativeFault[fault.name], NativeTarget[target.name], skip, count, delay_s)

    def fail_fences(self, count: int) -> None:
        self._backend.fail_fences(count)

    def unblock(self) -> None:
        self._backend.unblock()

    def land_late_writes(self) -> int:
        """None can: its black holes never touch memory."""
        return 0


@dataclass(slots=True)
class Worker:
    """One transceiver over an agent with faults on command, and its only pool."""

    transceiver: SessionRuntime
    agent: FaultyAgent | NativeFaults
    pool: KVPool

    @property
    def endpoint(self) -> str:
        return self.transceiver.local.endpoint

    def blocks(self, ids: Sequence[int]) -> torch.Tensor:
        """A copy of the bytes of some blocks: [blocks, slot bytes]."""
        return self.pool.buffer.view(self.pool.num_blocks, -1)[list(ids)].clone()

    def table(self, ids: Sequence[int]) -> BlockTable:
        return BlockTable(tuple(ids), tuple(int(self.pool.generations[block]) for block in ids))

    def advertise(self, ids: Sequence[int], stop: int, digest: bytes = DIGEST) -> tuple[bytes, FakeHold]:
        hold = FakeHold((self.table(ids),))
        return self.transceiver.advertise(hold, TokenRange(0, stop), digest, hold.release), hold

    def load(self, handle: bytes, ids: Sequence[int], tokens: TokenRange, digest: bytes = DIGEST) -> Load:
        load = Load()
        tables = (BlockTable(tuple(ids), ()),)
        load.load_id = self.transceiver.load(handle, digest, tables, tokens, load.on_done)
        return load

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.endpoint, self.transceiver.local.incarnation)

    @property
    def pushing(self) -> PushSide:
        side = self.transceiver.push_side
        assert side is not None
        return side

    def grant(
        self, writer: Worker, ids: Sequence[int], tokens: TokenRange, digest: bytes = DIGEST
    ) -> tuple[bytes, Load]:
        load = Load()
        tables = (BlockTable(tuple(ids), ()),)
        load.load_id, grant = self.pushing.grant(writer.address, digest, tables, tokens, load.on_done)
        return grant, load

    def open_push(self, grant: bytes, digest: bytes = DIGEST) -> Push:
        push = Push(self)
        push.push_id, _ = self.pushing.open_push(grant, digest, push.failures.append)
        return push


@dataclass(slots=True)
class Push:
    """An outgoing push under test."""

    worker: Worker
    push_id: int = 0
    failures: list[str] = field(default_factory=list)

    def part(self, ids: Sequence[int], tokens: TokenRange) -> FakeHold:
        hold = FakeHold((self.worker.table(ids),))
        self.worker.pushing.push(self.push_id, hold, tokens, hold.release)
        return hold

    def give_up(self) -> None:
        self.worker.pushing.give_up_push(self.push_id)


MODEL_LAYOUT = KVLayout(GroupKind.FULL, layers=(0, 1, 2, 3), kv_heads=2, head_dim=4, tokens_per_block=4)
"""Of a model of four layers and two kv heads, which `World.ranked` divides."""


@dataclass
class SameProcess:
    """`OtherRank` without a process of its own."""

    transceiver: SessionRuntime
    attended: list[float] = field(default_factory=list)

    @property
    def info(self) -> RankInfo:
        return self.transceiver.local

    def connect(self, endpoint: str, source_rank: int) -> Future[None]:
        future: Future[None] = Future()
        try:
            self.transceiver.connect_rank(endpoint, source_rank)
            future.set_result(None)
        except TransferError as error:
            future.set_exception(error)
        return future

    def load(self, request: PartRequest, on_done: Callable[[LoadResult], None]) -> int:
        return self.transceiver.load_part(
            request.handle, request.tokens_digest, request.tables, request.tokens, request.source_rank, on_done
        )

    def cancel(self, load_id: int) -> None:
        self.transceiver.cancel_load(load_id)

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        self.transceiver.when_quiet(load_id, on_quiet)

    def attend(self, seconds: float) -> None:
        self.attended.append(seconds)
        self.transceiver.attend(seconds)


@dataclass
class RankedWorker:
    """Rank 0 first in every list."""

    transceiver: RankedTransceiver
    agents: list[FaultyAgent]
    pools: list[KVPool]
    others: list[SameProcess]

    def head(self, rank: int, block: int, layer: int, plane: int, head: int) -> torch.Tensor:
        """[tokens, dims] of one of the model's layers and heads on a rank; raises where the rank does not hold it."""
        pool = self.pools[rank]
        return pool.view[block, pool.layout.layers.index(layer), plane, list(pool.layout.heads).index(head)]

    def advertise(self, ids: Sequence[int], stop: int) -> tuple[bytes, FakeHold]:
        hold = FakeHold((BlockTable(tuple(ids), tuple(int(self.pools[0].generations[block]) for block in ids)),))
        return self.transceiver.advertise(hold, TokenRange(0, stop), DIGEST, hold.release), hold

    def load(self, handle: bytes, ids: Sequence[int], tokens: TokenRange) -> Load:
        load = Load()
        load.load_id = self.transceiver.load(handle, DIGEST, (BlockTable(tuple(ids), ()),), tokens, load.on_done)
        return load


class World:
    """Workers that can reach each other; all of them are closed at the end."""

    def __init__(self, backend: str = "loopback") -> None:
        self.fabric = LoopbackFabric()
        self.backend = backend
        self.arenas: list[SharedArena] = []
        self.targets: dict[str, ControlTarget] = {}
        self.workers: list[Worker] = []

    def worker(
        self,
        role: Role,
        endpoint: str,
        *,
        layout: KVLayout = LAYOUT,
        blocks: int = 32,
        fingerprint: str = "model",
        transfer_timeout_s: float = 10.0,
        lease_s: float = 30.0,
        max_lease_s: float = 300.0,
        heartbeat_s: float = 1.0,
        handshake_timeout_s: float = 5.0,
        grace_s: float = 5.0,
    ) -> Worker:
        times = RuntimeTimes(
            transfer_timeout_s=transfer_timeout_s,
            lease_s=lease_s,
            max_lease_s=max_lease_s,
            heartbeat_s=heartbeat_s,
            handshake_timeout_s=handshake_timeout_s,
            grace_s=grace_s,
            first_contact_s=1.0,
            close_timeout_s=2.0,
        )
        incarnation = new_incarnation()
        arena = SharedArena()
        self.arenas.append(arena)
        identity = WorkerIdentity(f"{role.value}-{endpoint}", role, incarnation, endpoint, fingerprint, resolution())
        pool = make_pool(layout, blocks, arena.allocate if "shm" in self.backend else None)
        make = self._cpp if self.backend.startswith("cpp") else self._python
        self.workers.append(make(identity, pool, arena, times))
        self.targets[endpoint] = self.workers[-1].transceiver
        return self.workers[-1]

    def _python(self, identity: WorkerIdentity, pool: KVPool, arena: SharedArena, times: RuntimeTimes) -> Worker:
        agent = FaultyAgent(self.make_agent(identity.incarnation, arena))
        return Worker(PythonTransceiver(identity, [pool], agent, LocalControl(self.targets), times), agent, pool)

    def _cpp(self, identity: WorkerIdentity, pool: KVPool, arena: SharedArena, times: RuntimeTimes) -> Worker:
        if self.backend == "cpp-shm":
            memory = MemoryBackend()
            faulty = FaultyBackend(memory)
            agent: NativeAgent = NativeShmAgent(identity.incarnation, arena, memory, faulty)
        else:
            library = {"cpp-nixl": nixl_backend, "cpp-ucx": ucx_backend}[self.backend]
            faulty = FaultyBackend(library(identity.incarnation))
            agent = NativeAgent(faulty)
        transceiver = CppTransceiver(identity, [pool], agent, LocalControl(self.targets), times)
        return Worker(transceiver, NativeFaults(faulty), pool)

    def ranked(self, role: Role, endpoint: str, tp_size: int, pp_size: int, **times: float) -> RankedWorker:
        """A worker of several ranks on the PYTHON runtime, over memory copies."""
        settings = replace(
            RuntimeTimes(transfer_timeout_s=10.0, grace_s=5.0, first_contact_s=1.0, close_timeout_s=2.0), **times
        )
        incarnation, ranks = new_incarnation(), []
        for rank in range(tp_size * pp_size):
            place = RankPlace(rank % tp_size, tp_size, rank // tp_size, pp_size)
            each = len(MODEL_LAYOUT.layers) // pp_size
            layout = MODEL_LAYOUT.shard(place.tp_rank, tp_size, range(place.pp_rank * each, (place.pp_rank + 1) * each))
            assert layout is not None
            own, name = rank_incarnation(incarnation, rank), f"{role.value}-{endpoint}"
            identity = WorkerIdentity(name, role, own, endpoint, "model", resolution(), place)
            agent, pool = FaultyAgent(LoopbackAgent(own, self.fabric)), make_pool(layout, 16)
            transceiver = PythonTransceiver(identity, [pool], agent, LocalControl(self.targets), settings)
            ranks.append(Worker(transceiver, agent, pool))
        self.workers += ranks
        others = [SameProcess(rank.transceiver) for rank in ranks[1:]]
        worker = RankedWorker(
            RankedTransceiver(ranks[0].transceiver, others),
            [rank.agent for rank in ranks],
            [r.pool for r in ranks],
            others,
        )
        self.targets[endpoint] = worker.transceiver
        return worker

    def make_agent(self, incarnation: str, arena: SharedArena) -> Agent:
        if self.backend == "nixl":
            return NixlAgent(incarnation)
        if self.backend == "mooncake":
            return MooncakeAgent(incarnation)
        return ShmAgent(incarnation, arena) if self.backend == "shm" else LoopbackAgent(incarnation, self.fabric)

    def kill(self, worker: Worker) -> None:
        """As SIGKILL does: no goodbye, nothing answers any more."""
        self.targets.pop(worker.endpoint, None)
        self.fabric.agents.pop(worker.transceiver.local.incarnation, None)

    def close(self) -> None:
        for worker in self.workers:
            worker.agent.unblock()
            worker.transceiver.close()
        for arena in self.arenas:
            arena.close()


def make_pool(layout: KVLayout, blocks: int, allocate: Callable[[int], torch.Tensor] | None = None) -> KVPool:
    """Random bytes everywhere, so that a copy to or from the wrong place cannot look right."""
    take = allocate or (lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    buffer, generations = take(blocks * layout.slot_nbytes), take(8 * blocks).view(torch.int64)
    buffer.random_(0, 256)
    generations.copy_(torch.arange(100, 100 + blocks))
    row = layout.row_nbytes // layout.dtype.nbytes
    shape = (blocks, len(layout.layers), layout.planes, layout.kv_heads, layout.tokens_per_block, row)
    integers = {4: torch.int32, 2: torch.int16, 1: torch.int8}[layout.dtype.nbytes]  # no NaN, which differs from itself
    view = buffer.view(integers).view(shape)
    return KVPool(layout, blocks, buffer, view, generations)


def resolution(manager: str = "V2") -> Resolution:
    return Resolution(
        architecture="LlamaForCausalLM",
        backend="NIXL",
        runtime="PYTHON",
        runtime_source=Source.MODEL,
        manager=manager,
        manager_source=Source.MODEL,
        reason="test",
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.002)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Over memory copies within the process, and over the real things, on both runtimes."""
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture(params=[world for world in WORLDS if isinstance(world, str)])
def push_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Over all that may push: where a WRITE that is done has landed."""
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def mortal_world() -> Iterator[World]:
    """Whose workers can be killed: over NIXL that takes a process of its own."""
    made = World()
    yield made
    made.close()


@pytest.fixture
def mortal_pair(mortal_world: World) -> tuple[Worker, Worker]:
    return mortal_world.worker(Role.PREFILL, "p:1"), mortal_world.worker(Role.DECODE, "d:1")


@pytest.fixture
def pair(world: World) -> tuple[Worker, Worker]:
    return world.worker(Role.PREFILL, "p:1"), world.worker(Role.DECODE, "d:1")


@pytest.fixture
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def pool_of() -> Callable[[KVLayout, int], KVPool]:
    return make_pool


@pytest.fixture
def resolved() -> Resolution:
    return resolution()


@pytest.fixture
def fake_hold() -> type[FakeHold]:
    return FakeHold
