"""Decode first: the decode worker reserves, is passed each part, and starts with the first token."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvferry.core import (
    FinishReason,
    InternalError,
    InvalidRequestError,
    KVFerryError,
    OverloadedError,
    PeerAddress,
    SamplingParams,
    WorkerRequest,
    codec,
)
from kvferry.proto import generation_pb2 as pb
from kvferry.router import Flow, Schedule, worker_client

PROMPT = [1, 2, 3, 4, 5]
TOKENS = 20


@pytest.fixture
async def cluster(make_cluster: Any) -> Any:
    return await make_cluster(schedule=Schedule.DECODE_FIRST)


def request(max_tokens: int = TOKENS) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=max_tokens, seed=7)
    return pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), sampling=params)


async def two_pairs(cluster: Any) -> list[Any]:
    """Both decode workers, then both prefill workers."""
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        await cluster.add(name)
    await cluster.contact(cluster.workers["decode-0"], cluster.workers["decode-1"])
    return [cluster.workers[name] for name in ("decode-0", "decode-1", "prefill-0", "prefill-1")]


async def streamed(cluster: Any) -> tuple[list[int], pb.GenerateResponse]:
    tokens: list[int] = []
    last = pb.GenerateResponse()
    async for message in cluster.stub.GenerateStream(request(), timeout=20):
        tokens += message.token_ids
        last = message
    return tokens, last


async def eventually(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


async def test_decode_gets_the_reservation_the_parts_and_the_first_token(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    tokens, last = await streamed(cluster)
    assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
    assert (last.route.prefill, last.route.decode, last.route.disaggregated) == ("prefill-0", "decode-0", True)
    (reserved,), (started,) = decode.reserved, decode.requests
    assert reserved.output_token_ids == ()
    assert started.output_token_ids == (tokens[0],)
    assert [part.stop for part in decode.parts] == [2, 4]
    assert decode.parts[0].handle == f"{prefill.incarnation}/{reserved.request_id}/2".encode()
    assert decode.handles == [f"{prefill.incarnation}/{reserved.request_id}".encode()]
    assert (prefill.abandoned, prefill.released, prefill.cancelled, decode.cancelled) == ([], [], [], [])
    assert last.usage.cached_tokens == 3
    assert last.timings.prefill_ms == 2


async def test_reserved_before_the_prompt_is_computed(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    gate = asyncio.Event()

    async def wait(_: WorkerRequest, __: int) -> None:
        await gate.wait()

    prefill.on_prefill = wait
    answer = asyncio.ensure_future(streamed(cluster))
    await eventually(lambda: len(decode.parts) == 2)
    assert not answer.done()
    gate.set()
    assert (await answer)[0] == cluster.script.tokens(len(PROMPT), TOKENS)


async def test_ended_at_the_first_token_frees_the_reservation(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    prefill.prefill_finish = FinishReason.STOP
    tokens, last = await streamed(cluster)
    assert (tokens, last.route.disaggregated) == (cluster.script.tokens(len(PROMPT), 1), False)
    await eventually(lambda: len(decode.cancelled) == 1)
    assert decode.requests == []


async def test_killed_prefill_frees_the_reservation_and_is_replaced(cluster: Any) -> None:
    decodes, prefills = (workers := await two_pairs(cluster))[:2], workers[2:]
    killed: list[Any] = []

    async def kill(_: WorkerRequest, __: int) -> None:
        if not killed:
            killed.extend(worker for worker in prefills if worker.requests)
            asyncio.get_running_loop().create_task(killed[0].stop())
            await asyncio.sleep(5)

    prefills[0].on_prefill = prefills[1].on_prefill = kill
    tokens, last = await streamed(cluster)
    assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
    assert last.route.retries == 1
    await eventually(lambda: sum(len(worker.cancelled) for worker in decodes) == 1)
    assert sum(len(worker.reserved) for worker in decodes) == 2


async def test_decode_killed_while_the_prompt_is_computed_is_replaced(cluster: Any) -> None:
    decodes, prefills = (workers := await two_pairs(cluster))[:2], workers[2:]
    killed: list[Any] = []

    async def kill(_: WorkerRequest, __: int) -> None:
        if not killed:
            killed.extend(worker for worker in decodes if worker.reserved)
            await killed[0].stop()

    prefills[0].on_prefill = prefills[1].on_prefill = kill
    tokens, last = await streamed(cluster)
    assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
    assert last.route.retries == 1
    assert last.route.decode != killed[0].name
    # What the first prefill worker holds for nobody is given up.
    await eventually(lambda: sum(len(worker.abandoned) for worker in prefills) == 1)


@pytest.mark.parametrize(
    ("error", "retries"),
    [(OverloadedError("no room"), 1), (InvalidRequestError("no such token", field="stop_token_ids"), 0)],
)
async def test_a_reservation_that_fails_ends_or_moves_the_request(
    cluster: Any, error: KVFerryError, retries: int
) -> None:
    decodes, prefills = (workers := await two_pairs(cluster))[:2], workers[2:]
    failed: list[int] = []

    async def fail(_: WorkerRequest, __: int) -> None:
        if not failed:
            failed.append(1)
            raise error

    async def slow(_: WorkerRequest, __: int) -> None:
        await asyncio.sleep(0.2)

    decodes[0].on_reserve = decodes[1].on_reserve = fail
    prefills[0].on_prefill = prefills[1].on_prefill = slow
    if retries:
        tokens, last = await streamed(cluster)
        assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
        assert last.route.retries == retries
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await streamed(cluster)
        detail = dict(caught.value.trailing_metadata())[codec.ERROR_METADATA_KEY]
        assert codec.error_from_wire(detail).message == error.message
    await eventually(lambda: sum(len(worker.abandoned) for worker in prefills) == 1)


async def test_cancel_while_the_prompt_is_computed_ends_both_legs(cluster: Any) -> None:
    prefill, decode = await cluster.pair()

    async def wait(_: WorkerRequest, __: int) -> None:
        await asyncio.sleep(30)

    prefill.on_prefill = wait
    call = cluster.stub.GenerateStream(request(), timeout=20)
    reading = asyncio.ensure_future(call.read())
    await eventually(lambda: len(decode.parts) == 2)
    call.cancel()
    await eventually(lambda: prefill.cancelled and decode.cancelled and prefill.abandoned)
    await asyncio.gather(reading, return_exceptions=True)


class TestPush:
    async def test_prefill_gets_the_grant_and_sends_no_parts(self, cluster: Any) -> None:
        prefill, decode = await cluster.pair()
        decode.granting = b"room"
        tokens, last = await streamed(cluster)
        assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
        assert decode.writers == [PeerAddress(prefill.endpoint, prefill.incarnation)]
        assert (prefill.grants, decode.parts, decode.handles) == ([b"room"], [], [b""])
        assert (last.route.prefill, last.route.decode, last.route.disaggregated) == ("prefill-0", "decode-0", True)
        assert (prefill.abandoned, prefill.cancelled, decode.cancelled) == ([], [], [])

    async def test_a_decode_worker_that_would_rather_pull(self, cluster: Any) -> None:
        prefill, decode = await cluster.pair()
        decode.granting = b""
        tokens, _ = await streamed(cluster)
        assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
        assert prefill.grants == [b""]
        assert [part.stop for part in decode.parts] == [2, 4]

    async def test_a_grant_that_comes_too_late_is_ignored(self, cluster: Any) -> None:
        """The prompt is computed meanwhile, and pulled."""
        prefill, decode = await cluster.pair()
        decode.granting = b"room"

        async def slow(_: WorkerRequest, __: int) -> None:
            await asyncio.sleep(0.6)

        decode.on_reserve = slow
        tokens, _ = await streamed(cluster)
        assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
        assert prefill.grants == [b""]
        assert [part.stop for part in decode.parts] == [2, 4]

    async def test_flow_pull_asks_for_no_grant(self, make_cluster: Any) -> None:
        cluster = await make_cluster(schedule=Schedule.DECODE_FIRST, flow=Flow.PULL)
        prefill, decode = await cluster.pair()
        decode.granting = b"room"
        tokens, _ = await streamed(cluster)
        assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
        assert (decode.writers, prefill.grants) == ([], [b""])

    async def test_a_decode_worker_that_dies_before_it_has_granted(self, cluster: Any) -> None:
        decodes, _ = (workers := await two_pairs(cluster))[:2], workers[2:]
        killed: list[Any] = []

        async def kill(_: WorkerRequest, __: int) -> None:
            if not killed:
                killed.extend(worker for worker in decodes if worker.reserved)
                asyncio.get_running_loop().create_task(killed[0].stop())
                await asyncio.sleep(5)

        for worker in decodes:
            worker.granting, worker.on_reserve = b"room", kill
        tokens, last = await streamed(cluster)
        assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
        assert last.route.retries == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
def test_a_connection_that_breaks_under_a_write_is_a_lost_worker(code: grpc.StatusCode) -> None:
    """gRPC says INTERNAL where the worker dies while a step is being sent; a worker's own errors bring their detail."""
    empty = grpc.aio.Metadata()
    lease = SimpleNamespace(worker="decode-0", facts=SimpleNamespace(name="decode-0"))
    broken = grpc.aio.AioRpcError(code, empty, empty, details="Internal error from Core")
    assert worker_client._leg_error(lease, broken).lost is True
    said = grpc.aio.Metadata((codec.ERROR_METADATA_KEY, codec.error_to_wire(InternalError("a bug"), "r")))
    answered = worker_client._leg_error(lease, grpc.aio.AioRpcError(code, empty, said, details="a bug"))
    assert (answered.lost, answered.error.message) == (False, "a bug")


async def test_a_step_that_is_never_sent_fails_its_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "_STEP_TIMEOUT_S", 0.05)
    cancelled: list[bool] = []

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    call = SimpleNamespace(write=never, cancel=lambda: cancelled.append(True))
    lease: Any = SimpleNamespace(worker="decode-0", facts=SimpleNamespace(name="decode-0"), lost_reason=None)
    reserved = worker_client.ReservedCall(lease, call, "r")
    with pytest.raises(worker_client.LegError, match="not taken a step") as caught:
        await reserved.reserve(WorkerRequest("r", tuple(PROMPT), SamplingParams()))
    assert (caught.value.lost, cancelled) == (True, [True])
