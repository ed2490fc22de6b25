"""A source and a destination of KV in two real processes: what tests of single routes drive."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import torch
from hatchery import hatchery

from kvferry.core import BlockTable, GroupKind, KVLayout, PeerAddress, Resolution, Role, Source, TokenRange
from kvferry.kvcache import KVPool
from kvferry.transceiver import LoadResult, Transceiver, add_transceiver_service, create_transceiver, pool_memory

LAYOUT = KVLayout(GroupKind.FULL, layers=(0, 1, 2, 3), kv_heads=2, head_dim=16)
NIXL = "NIXL/PYTHON/V2"
SHM = "SHM/PYTHON/V2"
VMREAD = "VMREAD/PYTHON/V2"
NIXL_V1, NIXL_CPP = "NIXL/PYTHON/V1", "NIXL/CPP/V1"
UCX = "UCX/CPP/V1"
MOONCAKE = "MOONCAKE/PYTHON/V2"
SHM_V1, SHM_CPP = "SHM/PYTHON/V1", "SHM/CPP/V1"
PAIRS = [
    (NIXL, NIXL),
    (NIXL_CPP, NIXL_CPP),
    (NIXL_V1, NIXL_CPP),
    (NIXL_CPP, NIXL_V1),
    (UCX, UCX),
    (SHM, SHM),
    (SHM_CPP, SHM_CPP),
    (SHM_V1, SHM_CPP),
    (SHM_CPP, SHM_V1),
    (VMREAD, VMREAD),
]
"""(source, destination), each backend/runtime/manager; MOONCAKE beside them, which needs a library and only pulls."""
DIGEST = bytes(range(32))
BLOCKS = 64
THIRD_PARTY = Path(__file__).with_name("vmread")


class SourceProcess:
    """The other process. Every answer is waited for with a bound by pytest's own timeout."""

    def __init__(
        self, incarnation: str, port: int = 0, blocks: int = BLOCKS, lease_s: float = 30.0, route: str = NIXL
    ) -> None:
        script = Path(__file__).parents[1] / "transceiver" / "source_process.py"
        arguments = [route, incarnation, str(port), str(blocks), str(lease_s)]
        self.process = hatchery().hatch(script, arguments, {**os.environ, "PYTHONPATH": str(THIRD_PARTY)})
        self.route = route
        self.port: int = self._read()["port"]

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def advertise(self, ids: list[int], stop: int) -> bytes:
        return bytes.fromhex(self.ask("advertise", ids=ids, stop=stop, digest=DIGEST.hex())["handle"])

    def bytes_of(self, ids: list[int]) -> bytes:
        return bytes.fromhex(self.ask("bytes", ids=ids)["bytes"])

    def wait_for(self, **wanted: int) -> None:
        deadline_s = time.monotonic() + 10
        while (stats := self.ask("stats")) != {**stats, **wanted}:
            assert time.monotonic() < deadline_s, f"{stats} never became {wanted}"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def _read(self) -> dict[str, Any]:
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # UCX may print warnings of its own
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError("the source process ended")


class Control:
    """A gRPC server on a loop and thread of its own, as every worker has one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server, port = self._call(self._bind())
        self.endpoint = f"127.0.0.1:{port}"

    def serve(self, transceiver: Transceiver) -> None:
        add_transceiver_service(self._server, transceiver)
        self._call(self._server.start())

    def close(self) -> None:
        self._call(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _bind(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        return server, server.add_insecure_port("127.0.0.1:0")

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class Destination:
    """This process's side."""

    def __init__(self, transfer_timeout_ms: int = 10_000, blocks: int = BLOCKS, route: str = NIXL) -> None:
        backend, runtime, manager = route.split("/")
        resolution = Resolution("LlamaForCausalLM", backend, runtime, Source.USER, manager, Source.USER, "test")
        self.memory = pool_memory(resolution)
        take = self.memory.allocate if self.memory else lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
        buffer, generations = take(blocks * LAYOUT.slot_nbytes), take(8 * blocks).view(torch.int64)
        self.pool = KVPool(LAYOUT, blocks, buffer, buffer.view(torch.int32), generations)
        self.control = Control()
        self.transceiver: Transceiver = create_transceiver(
            resolution=resolution,
            worker="decode-0",
            role=Role.DECODE,
            incarnation="decode-life-1",
            model_fingerprint="model",
            pools=[self.pool],
            endpoint=self.control.endpoint,
            transfer_timeout_ms=transfer_timeout_ms,
            memory=self.memory,
        )
        self.control.serve(self.transceiver)

    def grant(self, writer: SourceProcess, ids: list[int], stop: int) -> Push:
        side = self.transceiver.push_side
        assert side is not None
        push = Push(writer, threading.Event(), [])

        def on_done(result: LoadResult) -> None:
            push.results.append(result)
            push.done.set()

        address = PeerAddress(writer.endpoint, "prefill-life-1")
        push.load_id, grant = side.grant(address, DIGEST, [BlockTable(tuple(ids), ())], TokenRange(0, stop), on_done)
        push.push_id = writer.ask("open_push", grant=grant.hex(), digest=DIGEST.hex())["push_id"]
        return push

    def quiet_within(self, load_id: int, seconds: float) -> bool:
        quiet = threading.Event()
        self.transceiver.when_quiet(load_id, quiet.set)
        return quiet.wait(seconds)

    def start(self, handle: bytes, ids: list[int], tokens: TokenRange) -> tuple[threading.Event, list[LoadResult]]:
        done, results = threading.Event(), []

        def on_done(result: LoadResult) -> None:
            results.append(result)
            done.set()

        self.transceiver.load(handle, DIGEST, [BlockTable(tuple(ids), ())], tokens, on_done)
        return done, results

    def load(self, handle: bytes, ids: list[int], tokens: TokenRange) -> LoadResult:
        done, results = self.start(handle, ids, tokens)
        assert done.wait(30), "the load never ended"
        return results[0]

    def close(self) -> None:
        self.transceiver.close()
        self.control.close()
        if self.memory is not None:
            self.memory.close()

    def bytes_of(self, ids: list[int]) -> bytes:
        rows: bytes = self.pool.buffer.view(self.pool.num_blocks, -1)[ids].numpy().tobytes()
        return rows


@dataclass
class Push:
    """What a source writes here."""

    writer: SourceProcess
    done: threading.Event
    results: list[LoadResult]
    load_id: int = 0
    push_id: int = 0

    def part(self, ids: list[int], start: int, stop: int, wait_s: float = 10.0) -> bool:
        """Whether it has been written, or given up, in time."""
        answer = self.writer.ask("push", push_id=self.push_id, ids=ids, start=start, stop=stop, wait_s=wait_s)
        return bool(answer["released"])

    def result(self) -> LoadResult:
        assert self.done.wait(30), "the push never ended"
        return self.results[0]
