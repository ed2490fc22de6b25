"""Both roles' gRPC services and real transceivers, driven as the router drives them, without models or processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from echo_engine import BLOCK, LAYOUT, STATE, EchoRunner, expected_output, nbytes_of

from kvferry.core import (
    FinishReason,
    HandOffPart,
    KVLayout,
    PeerAddress,
    Resolution,
    Role,
    SamplingParams,
    Source,
    WorkerRequest,
)
from kvferry.decode import DecodeWorker
from kvferry.engine import EngineSettings
from kvferry.kvcache import create_manager
from kvferry.prefill import PrefillWorker
from kvferry.router.worker_client import LegError, ReservedCall, WorkerClients
from kvferry.router.worker_client import PrefillResult as Answer
from kvferry.transceiver import WorkerIdentity, add_transceiver_service
from kvferry.transceiver.control_client import GrpcControlClient
from kvferry.transceiver.faulty import Fault, FaultyAgent
from kvferry.transceiver.implementation import RuntimeTimes
from kvferry.transceiver.loopback import LoopbackAgent, LoopbackFabric
from kvferry.transceiver.python_runtime import PythonTransceiver

RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "test")
PROMPT = list(range(10, 60))
ROLES = (Role.PREFILL, Role.DECODE)
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
    agent_p: FaultyAgent

    @property
    def writer(self) -> PeerAddress:
        return PeerAddress(self.prefill.facts.endpoint, self.prefill.facts.incarnation)

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
def layouts() -> tuple[KVLayout, ...]:
    return (LAYOUT,)


@pytest.fixture
async def pair(layouts: tuple[KVLayout, ...]) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        fabric = LoopbackFabric()
        made: list[Any] = []
        agents = {role: FaultyAgent(LoopbackAgent(f"{role.value}-life", fabric)) for role in ROLES}
        for role in ROLES:
            server = grpc.aio.server()
            endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            manager = create_manager("V2", layouts, nbytes_of(layouts, 64))
            transceiver = PythonTransceiver(
                WorkerIdentity(role.value, role, f"{role.value}-life", endpoint, "model", RESOLUTION),
                manager.pools,
                agents[role],
                GrpcControlClient(),
                RuntimeTimes(transfer_timeout_s=5.0),
            )
            runner: Any = EchoRunner(EngineSettings(tokens_per_block=BLOCK, step_token_budget=18), layouts=layouts)
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
        yield Pair(prefill, decode, clients, manager_p, manager_d, agents[Role.PREFILL])


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


async def prefilled(pair: Pair, asked: WorkerRequest, call: ReservedCall, grant: bytes) -> tuple[list[int], Answer]:
    """Where the parts ended that came, each passed on, and the answer."""
    stops: list[int] = []
    async with aclosing(pair.clients.prefill_in_parts(pair.prefill, asked, grant)) as steps:
        async for step in steps:
            if isinstance(step, Answer):
                return stops, step
            stops.append(step.stop)
            await call.load(step)
    raise AssertionError("no answer")


async def answered(asked: WorkerRequest, call: ReservedCall, result: Answer) -> tuple[list[int], int]:
    """The tokens, and the bytes that moved."""
    first = result.aux.first_token_id
    await call.start(replace(asked, output_token_ids=(first,)), result.handle, result.aux)
    deltas = [delta async for delta in call.deltas()]
    return [first, *(token for delta in deltas for token in delta.token_ids)], deltas[-1].transferred_bytes


class TestPush:
    async def test_all_is_written_to_where_decode_has_room(self, pair: Pair) -> None:
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked, pair.writer)
        grant = await call.granted(5.0)
        assert grant
        stops, result = await prefilled(pair, asked, call, grant)
        assert (stops, result.handle) == ([], b"")
        moved = len(PROMPT) * LAYOUT.token_nbytes
        assert await answered(asked, call, result) == (expected_output(PROMPT, COUNT), moved)
        await pair.baseline()

    async def test_what_decode_holds_already_is_not_written_again(self, pair: Pair) -> None:
        for number, moved in enumerate((len(PROMPT), len(PROMPT) % BLOCK)):
            asked = replace(request(), request_id=f"r{number}")
            call = pair.reserve(asked)
            await call.reserve(asked, pair.writer)
            grant = await call.granted(5.0)
            assert grant
            _, result = await prefilled(pair, asked, call, grant)
            assert await answered(asked, call, result) == (expected_output(PROMPT, COUNT), moved * LAYOUT.token_nbytes)
        await pair.baseline()

    async def test_a_full_hit_is_not_granted(self, pair: Pair) -> None:
        prompt = [3] * (4 * BLOCK)
        for number, granted in enumerate((True, False)):
            asked = replace(request(), request_id=f"r{number}", prompt_token_ids=tuple(prompt))
            call = pair.reserve(asked)
            await call.reserve(asked, pair.writer)
            grant = await call.granted(5.0)
            assert bool(grant) == granted
            _, result = await prefilled(pair, asked, call, grant)
            moved = len(prompt) * LAYOUT.token_nbytes if granted else 0
            assert await answered(asked, call, result) == (expected_output(prompt, COUNT), moved)
        await pair.baseline()

    @pytest.mark.parametrize("grant", [b"", b"forged"])
    async def test_a_prefill_worker_that_cannot_use_the_grant_is_pulled_from(self, pair: Pair, grant: bytes) -> None:
        """The first part takes the grant back."""
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked, pair.writer)
        assert await call.granted(5.0)
        stops, result = await prefilled(pair, asked, call, grant)
        assert stops == [16, 36]
        moved = len(PROMPT) * LAYOUT.token_nbytes
        assert await answered(asked, call, result) == (expected_output(PROMPT, COUNT), moved)
        await pair.baseline()

    async def test_a_grant_for_another_life_of_the_writer_is_pulled_in_the_end(self, pair: Pair) -> None:
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked, replace(pair.writer, incarnation="former"))
        grant = await call.granted(5.0)
        _, result = await prefilled(pair, asked, call, grant)
        tokens, moved = await answered(asked, call, result)
        assert tokens == expected_output(PROMPT, COUNT)
        assert moved in (0, len(PROMPT) * LAYOUT.token_nbytes)  # computed by decode when all was done too soon
        await pair.baseline()

    @pytest.mark.parametrize("skip", [0, 1, 2])
    async def test_after_a_part_that_failed_decode_computes_the_prompt(self, pair: Pair, skip: int) -> None:
        pair.agent_p.inject(Fault.DROP, skip=skip + 1)  # first contact reads a word
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked, pair.writer)
        _, result = await prefilled(pair, asked, call, await call.granted(5.0))
        assert await answered(asked, call, result) == (expected_output(PROMPT, COUNT), 0)
        await pair.baseline()

    async def test_leaving_before_the_prompt_is_computed(self, pair: Pair) -> None:
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked, pair.writer)
        assert await call.granted(5.0)
        call.cancel()
        await pair.baseline()

    async def test_leaving_once_it_has_been_computed(self, pair: Pair) -> None:
        pair.agent_p.inject(Fault.DELAY, skip=2, delay_s=0.5)
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked, pair.writer)
        await prefilled(pair, asked, call, await call.granted(5.0))
        call.cancel()
        await pair.clients.abandon(pair.prefill, asked.request_id, 2.0)
        await pair.baseline()

    async def test_ended_at_the_first_token(self, pair: Pair) -> None:
        asked = request(count=1)
        call = pair.reserve(asked)
        await call.reserve(asked, pair.writer)
        _, result = await prefilled(pair, asked, call, await call.granted(5.0))
        assert (result.finish_reason, result.aux.first_token_id) == (FinishReason.LENGTH, expected_output(PROMPT, 1)[0])
        call.cancel()
        await pair.baseline()

    @pytest.mark.parametrize("layouts", [(LAYOUT, STATE)])
    async def test_a_state_is_written_with_the_last_step(self, pair: Pair) -> None:
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked, pair.writer)
        stops, result = await prefilled(pair, asked, call, await call.granted(5.0))
        assert (stops, result.handle) == ([], b"")
        moved = len(PROMPT) * LAYOUT.token_nbytes + STATE.slot_nbytes
        assert await answered(asked, call, result) == (expected_output(PROMPT, COUNT), moved)

    async def test_start_without_all_of_the_prompt_is_no_answer_from_holes(self, pair: Pair) -> None:
        """Whoever says that it was pushed, and pushed nothing: decode computes the prompt."""
        asked = request()
        call = pair.reserve(asked)
        await call.reserve(asked)
        result = replace(await pair.clients.prefill(pair.prefill, asked), handle=b"")
        assert await answered(asked, call, result) == (expected_output(PROMPT, COUNT), 0)
