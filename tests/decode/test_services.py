"""Both roles' gRPC services and real transceivers, driven as the router drives them, without models or processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from echo_engine import BLOCK, LAYOUT, EchoRunner, expected_output

from kvferry.core import HandOffPart, Resolution, Role, SamplingParams, Source, WorkerRequest
from kvferry.decode import DecodeWorker
from kvferry.engine import EngineSettings
from kvferry.kvcache import create_manager
from kvferry.prefill import PrefillWorker
from kvferry.router.worker_client import LegError, ReservedCall, WorkerClients
from kvferry.router.worker_client import PrefillResult as Answer
from kvferry.transceiver import WorkerIdentity, add_transceiver_service
from kvferry.transceiver.control_client import GrpcControlClient
from kvferry.transceiver.implementation import RuntimeTimes
from kvferry.transceiver.loopback import LoopbackAgent, LoopbackFabric
from kvferry.transceiver.python_runtime import PythonTransceiver

RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "test")
PROMPT = list(range(10, 60))
COUNT = 8


@dataclass
class Facts:
    name: str
    incarnation: str
    endpoint: str


class Place:
    """What a client needs of a lease."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.worker = facts.name
        self.lost_reason: str | None = None

    def cancel_with(self, cancel: Callable[[], object]) -> None:
        pass


@dataclass
class Pair:
    prefill: Any
    decode: Any
    clients: WorkerClients
    manager_p: Any
    manager_d: Any

    def reserve(self, request: WorkerRequest) -> ReservedCall:
        return self.clients.reserve(self.decode, request)

    async def baseline(self) -> None:
        async with asyncio.timeout(5):
            for manager in (self.manager_p, self.manager_d):
                while (counts := manager.counts()).free != counts.total or counts.pinned or counts.quarantined:
                    await asyncio.sleep(0.01)


def request(count: int = COUNT) -> WorkerRequest:
    return WorkerRequest("r", tuple(PROMPT), SamplingParams(max_tokens=count, temperature=0.0))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        fabric = LoopbackFabric()
        made: list[Any] = []
        for role in (Role.PREFILL, Role.DECODE):
            server = grpc.aio.server()
            endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            manager = create_manager("V2", (LAYOUT,), 64 * LAYOUT.slot_nbytes)
            transceiver = PythonTransceiver(
                WorkerIdentity(role.value, role, f"{role.value}-life", endpoint, "model", RESOLUTION),
                manager.pools,
                LoopbackAgent(f"{role.value}-life", fabric),
                GrpcControlClient(),
                RuntimeTimes(transfer_timeout_s=5.0),
            )
            runner: Any = EchoRunner(EngineSettings(tokens_per_block=BLOCK, step_token_budget=18))
            kind: Any = PrefillWorker if role is Role.PREFILL else DecodeWorker
            worker = kind(role.value, runner, manager, transceiver, None)
            worker.add_to(server)
            add_transceiver_service(server, transceiver)
            await server.start()
            worker.start()
            stack.push_async_callback(asyncio.to_thread, worker.close)
            stack.push_async_callback(server.stop, None)
            made.append((Place(Facts(role.value, f"{role.value}-life", endpoint)), manager))
        clients = WorkerClients()
        stack.push_async_callback(clients.close)
        (prefill, manager_p), (decode, manager_d) = made
        yield Pair(prefill, decode, clients, manager_p, manager_d)


async def test_a_prompt_in_parts_is_answered_and_leaves_nothing(pair: Pair) -> None:
    asked = request()
    call = pair.reserve(asked)
    await call.reserve(asked)
    stops, result = [], None
    async with aclosing(pair.clients.prefill_in_parts(pair.prefill, asked)) as steps:
        async for step in steps:
            if isinstance(step, HandOffPart):
                stops.append(step.stop)
                await call.load(step)
            else:
                result = step
    assert isinstance(result, Answer)
    assert stops == [16, 36]
    first = result.aux.first_token_id
    await call.start(replace(asked, output_token_ids=(first,)), result.handle, result.aux)
    deltas = [delta async for delta in call.deltas()]
    tokens = [first, *(token for delta in deltas for token in delta.token_ids)]
    assert tokens == expected_output(PROMPT, COUNT)
    assert deltas[-1].transferred_bytes == len(PROMPT) * LAYOUT.token_nbytes
    await pair.baseline()


@pytest.mark.parametrize("parts", [0, 1])
async def test_leaving_in_the_middle_frees_both(pair: Pair, parts: int) -> None:
    asked = request()
    call = pair.reserve(asked)
    await call.reserve(asked)
    async with aclosing(pair.clients.prefill_in_parts(pair.prefill, asked)) as steps:
        for _ in range(parts):
            part = await anext(steps)
            assert isinstance(part, HandOffPart)
            await call.load(part)
    call.cancel()
    await pair.clients.abandon(pair.prefill, asked.request_id, 2.0)
    await pair.baseline()


async def test_a_forged_part_is_recomputed_with_the_first_token(pair: Pair) -> None:
    asked = request()
    call = pair.reserve(asked)
    await call.reserve(asked)
    result = await pair.clients.prefill(pair.prefill, asked)
    await call.load(HandOffPart(b"forged", 16))
    await call.start(replace(asked, output_token_ids=(result.aux.first_token_id,)), result.handle, result.aux)
    deltas = [delta async for delta in call.deltas()]
    tokens = [result.aux.first_token_id, *(token for delta in deltas for token in delta.token_ids)]
    assert tokens == expected_output(PROMPT, COUNT)
    assert deltas[-1].transferred_bytes == 0
    await pair.baseline()


async def test_a_reservation_that_cannot_be_says_why(pair: Pair) -> None:
    asked = replace(request(), prompt_token_ids=tuple(range(1, 400)))
    call = pair.reserve(asked)
    await call.reserve(asked)
    with pytest.raises(LegError, match="the pool holds 256"):
        await anext(call.deltas())
