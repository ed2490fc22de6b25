"""The prefill side of the transfer benchmark, in a process of its own: one JSON object per line, both ways.

python -m kvferry.bench.transfer_source ROUTE SHAPE
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import grpc.aio

from kvferry.bench.transfer_shapes import SHAPES, make_pool, route_resolution
from kvferry.core import BlockTable, Role, TokenRange, TransferError, new_incarnation
from kvferry.kvcache import BlockHold, KVPool
from kvferry.transceiver import (
    Agent,
    PoolMemory,
    Transceiver,
    add_transceiver_service,
    create_transceiver,
    pool_memory,
)
from kvferry.transceiver.base import CompletedOperation, CopyArray, Direction, Operation
from kvferry.transceiver.memory import SharedArena
from kvferry.transceiver.mooncake import MooncakeAgent
from kvferry.transceiver.nixl import NixlAgent
from kvferry.transceiver.shm import ShmAgent

BARE = "bare-source"
_PART_S = 60.0
_MOONCAKE_BATCH = 1024
"""More than twice that in one call and Mooncake's engine never works again."""


class BareMooncake(MooncakeAgent):
    """As its own users call it: whole batches, waited for in C++."""

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        assert direction is Direction.READ
        for start in range(0, len(copies), _MOONCAKE_BATCH):
            columns = copies[start : start + _MOONCAKE_BATCH].T.tolist()
            if self.engine.batch_transfer_sync_read(self.segment_of(peer), *columns) != 0:
                raise TransferError("Mooncake did not read a batch")
        return CompletedOperation()


def bare_agent(route: str, name: str, memory: PoolMemory | None) -> Agent:
    """What is below a transceiver, alone: copies between shared pools, Mooncake's engine, or NIXL's Python API (also
    for UCX, which is what NIXL moves with)."""
    if isinstance(memory, SharedArena):
        return ShmAgent(name, memory)
    return BareMooncake(name) if route.startswith("MOONCAKE") else NixlAgent(name)


class _Hold(BlockHold):
    def __init__(self, table: BlockTable) -> None:
        self._table = table

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return (self._table,)

    def release(self) -> None:
        pass


class TransferSource:
    def __init__(self, route: str, transceiver: Transceiver, pool: KVPool, memory: PoolMemory | None) -> None:
        self._route = route
        self._memory = memory
        self._transceiver = transceiver
        self._pool = pool
        self._bare: Agent | None = None
        self._resting = threading.Event()
        self._looking: threading.Thread | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        answers = {
            "advertise": self._advertise,
            "push": self._push,
            "bare": self._describe_bare,
            "look": self._look,
            "rest": self._rest,
            "cpu": self._cpu,
        }
        return answers[command["do"]](command)

    def _advertise(self, command: dict[str, Any]) -> dict[str, Any]:
        ids = command["ids"]
        hold = _Hold(BlockTable(tuple(ids), tuple(self._pool.generations[ids].tolist())))
        computed_s, started = time.monotonic(), time.perf_counter()
        handle = self._transceiver.advertise(hold, TokenRange(0, command["tokens"]), b"b" * 32, hold.release)
        return {"handle": handle.hex(), "seconds": time.perf_counter() - started, "computed_s": computed_s}

    def _push(self, command: dict[str, Any]) -> dict[str, Any]:
        """One part after the other, each when the one before has been written; when the last was handed in."""
        side, ids, stops = self._transceiver.push_side, command["ids"], command["stops"]
        assert side is not None
        hold = _Hold(BlockTable(tuple(ids), tuple(self._pool.generations[ids].tolist())))
        written = threading.Event()

        def failed(reason: str) -> None:
            written.set()

        push_id, tokens = side.open_push(bytes.fromhex(command["grant"]), b"b" * 32, failed)
        computed_s, start = 0.0, tokens.start
        for stop in stops:
            written.clear()
            computed_s = time.monotonic()
            side.push(push_id, hold, TokenRange(start, stop), written.set)
            start = stop
            if stop != stops[-1]:
                written.wait(_PART_S)
        return {"computed_s": computed_s}

    def _describe_bare(self, command: dict[str, Any]) -> dict[str, Any]:
        """A second agent over the same memory, with nothing of ours on top."""
        self._bare = bare_agent(self._route, BARE, self._memory)
        self._bare.register(self._pool.region)
        return {"metadata": self._bare.metadata().hex()}

    def _look(self, command: dict[str, Any]) -> dict[str, Any]:
        """NIXL makes progress at its target only when that looks for notifications: a thread does, until `rest`."""
        agent, resting = self._bare, self._resting
        assert agent is not None
        resting.clear()

        def look() -> None:
            while not resting.wait(0.001):
                agent.drain_notifications()

        self._looking = threading.Thread(target=look)
        self._looking.start()
        return {}

    def _rest(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._looking is not None
        self._resting.set()
        self._looking.join()
        return {}

    def _cpu(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"seconds": time.process_time()}


async def main(route: str, shape_name: str) -> None:
    shape, resolution = SHAPES.get(shape_name), route_resolution(route)
    memory = pool_memory(resolution)
    pool = make_pool(shape.layout, shape.blocks, memory.allocate if memory else None)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    transceiver = create_transceiver(
        resolution=resolution,
        worker="bench-prefill",
        role=Role.PREFILL,
        incarnation=new_incarnation(),
        model_fingerprint=shape_name,
        pools=[pool],
        endpoint=f"127.0.0.1:{port}",
        transfer_timeout_ms=60_000,
        memory=memory,
    )
    add_transceiver_service(server, transceiver)
    await server.start()
    source = TransferSource(route, transceiver, pool, memory)
    print(json.dumps({"endpoint": f"127.0.0.1:{port}"}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await loop.run_in_executor(None, source.answer, json.loads(line))), flush=True)
    await server.stop(None)
    transceiver.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
