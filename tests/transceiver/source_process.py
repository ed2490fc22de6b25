"""A prefill worker's transceiver in a process of its own, driven over stdin: one JSON object per line, both ways.

python source_process.py ROUTE INCARNATION PORT BLOCKS LEASE_S
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import grpc.aio
import torch

from kvferry.core import BlockTable, GroupKind, KVLayout, Resolution, Role, Source, TokenRange
from kvferry.kvcache import BlockHold, KVPool
from kvferry.transceiver import PoolMemory, Transceiver, add_transceiver_service, create_transceiver, pool_memory

FAILURES: list[str] = []
"""Of pushes."""
LAYOUT = KVLayout(GroupKind.FULL, layers=(0, 1, 2, 3), kv_heads=2, head_dim=16)


class Hold(BlockHold):
    def __init__(self, table: BlockTable) -> None:
        self._table = table

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return (self._table,)

    def release(self) -> None:
        pass


def make_pool(blocks: int, memory: PoolMemory | None) -> KVPool:
    take = memory.allocate if memory else lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    buffer, generations = take(blocks * LAYOUT.slot_nbytes), take(8 * blocks).view(torch.int64)
    buffer.random_(0, 256, generator=torch.Generator().manual_seed(blocks))
    generations.copy_(torch.arange(7, 7 + blocks))
    return KVPool(LAYOUT, blocks, buffer, buffer.view(torch.int32), generations)


def answer(command: dict[str, Any], transceiver: Transceiver, pool: KVPool) -> dict[str, Any]:
    if command["do"] == "advertise":
        ids = command["ids"]
        table = BlockTable(tuple(ids), tuple(int(pool.generations[block]) for block in ids))
        digest = bytes.fromhex(command["digest"])
        handle = transceiver.advertise(Hold(table), TokenRange(0, command["stop"]), digest, lambda: None)
        return {"handle": handle.hex()}
    if command["do"] == "open_push":
        side = transceiver.push_side
        assert side is not None
        push_id, _ = side.open_push(bytes.fromhex(command["grant"]), bytes.fromhex(command["digest"]), FAILURES.append)
        return {"push_id": push_id}
    if command["do"] == "push":
        side, ids = transceiver.push_side, command["ids"]
        assert side is not None
        table = BlockTable(tuple(ids), tuple(int(pool.generations[block]) for block in ids))
        tokens, released = TokenRange(command["start"], command["stop"]), threading.Event()
        side.push(command["push_id"], Hold(table), tokens, released.set)
        return {"released": released.wait(command["wait_s"]), "failures": FAILURES}
    if command["do"] == "bytes":
        rows = pool.buffer.view(pool.num_blocks, -1)[command["ids"]]
        return {"bytes": rows.numpy().tobytes().hex()}
    if command["do"] == "overwrite":
        pool.generations[command["id"]] += 1
        pool.buffer.view(pool.num_blocks, -1)[command["id"]] = 0
        return {}
    if command["do"] == "cpu":
        return {"seconds": time.process_time()}
    stats = transceiver.stats()
    return {"open_holds": stats.open_holds, "handed_off": stats.handed_off, "expired_leases": stats.expired_leases}


async def main(route: str, incarnation: str, port: str, blocks: str, lease_s: str) -> None:
    backend, runtime, manager = route.split("/")
    resolution = Resolution("LlamaForCausalLM", backend, runtime, Source.USER, manager, Source.USER, "test")
    memory = pool_memory(resolution)
    pool = make_pool(int(blocks), memory)
    server = grpc.aio.server()
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    transceiver = create_transceiver(
        resolution=resolution,
        worker="prefill-0",
        role=Role.PREFILL,
        incarnation=incarnation,
        model_fingerprint="model",
        pools=[pool],
        endpoint=f"127.0.0.1:{bound}",
        transfer_timeout_ms=10_000,
        memory=memory,
        lease_s=float(lease_s),
    )
    add_transceiver_service(server, transceiver)
    await server.start()
    print(json.dumps({"port": bound}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(answer(json.loads(line), transceiver, pool)), flush=True)
    transceiver.close()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
