"""A prefill worker's transceiver in a process of its own, driven over stdin: one JSON object per line, both ways.

python source_process.py INCARNATION PORT BLOCKS LEASE_S
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc.aio
import torch

from kvferry.core import BlockTable, GroupKind, KVLayout, Resolution, Role, Source, TokenRange
from kvferry.kvcache import BlockHold, KVPool
from kvferry.transceiver import Transceiver, add_transceiver_service, create_transceiver

LAYOUT = KVLayout(GroupKind.FULL, layers=(0, 1, 2, 3), kv_heads=2, head_dim=16)
RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "test")


class Hold(BlockHold):
    def __init__(self, table: BlockTable) -> None:
        self._table = table

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return (self._table,)

    def release(self) -> None:
        pass


def make_pool(blocks: int) -> KVPool:
    generator = torch.Generator().manual_seed(blocks)
    words = torch.randint(-(2**31), 2**31, (blocks * LAYOUT.slot_nbytes // 4,), dtype=torch.int32, generator=generator)
    generations = torch.arange(7, 7 + blocks, dtype=torch.int64)
    return KVPool(LAYOUT, blocks, words.view(torch.uint8), words, generations)


def answer(command: dict[str, Any], transceiver: Transceiver, pool: KVPool) -> dict[str, Any]:
    if command["do"] == "advertise":
        ids = command["ids"]
        table = BlockTable(tuple(ids), tuple(int(pool.generations[block]) for block in ids))
        digest = bytes.fromhex(command["digest"])
        handle = transceiver.advertise(Hold(table), TokenRange(0, command["stop"]), digest, lambda: None)
        return {"handle": handle.hex()}
    if command["do"] == "bytes":
        rows = pool.buffer.view(pool.num_blocks, -1)[command["ids"]]
        return {"bytes": rows.numpy().tobytes().hex()}
    if command["do"] == "overwrite":
        pool.generations[command["id"]] += 1
        pool.buffer.view(pool.num_blocks, -1)[command["id"]] = 0
        return {}
    stats = transceiver.stats()
    return {"open_holds": stats.open_holds, "handed_off": stats.handed_off, "expired_leases": stats.expired_leases}


async def main(incarnation: str, port: str, blocks: str, lease_s: str) -> None:
    pool = make_pool(int(blocks))
    server = grpc.aio.server()
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    transceiver = create_transceiver(
        resolution=RESOLUTION,
        worker="prefill-0",
        role=Role.PREFILL,
        incarnation=incarnation,
        model_fingerprint="model",
        pools=[pool],
        endpoint=f"127.0.0.1:{bound}",
        transfer_timeout_ms=10_000,
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
