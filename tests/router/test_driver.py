"""Workers that fail at each phase: every request ends with the right tokens, each once, or a clear error."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvferry.core import (
    InvalidRequestError,
    KVFerryError,
    OverloadedError,
    TransferError,
    UnavailableError,
    WorkerRequest,
    codec,
)
from kvferry.proto import generation_pb2 as pb

PROMPT = [1, 2, 3, 4, 5]
TOKENS = 20


def request(max_tokens: int = TOKENS) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=max_tokens, seed=7)
    return pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), sampling=params)


async def two_pairs(cluster: Any) -> None:
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        await cluster.add(name)
    await cluster.contact(cluster.workers["decode-0"], cluster.workers["decode-1"])


def once(fault: Any, at: int = -1) -> Any:
    """A hook for several workers: runs `fault` the first time one of them is at token `at` (-1: at any)."""
    done: list[int] = []

    async def hook(worker_request: WorkerRequest, position: int) -> None:
        if not done and at in (-1, position):
            done.append(position)
            await fault()

    return hook


async def streamed(cluster: Any, wire: pb.GenerateRequest) -> tuple[list[int], str, pb.GenerateResponse]:
    tokens: list[int] = []
    text = ""
    last = pb.GenerateResponse()
    async for message in cluster.stub.GenerateStream(wire, timeout=20):
        tokens += message.token_ids
        text += message.text
        last = message
    return tokens, text, last


def assert_whole(cluster: Any, tokens: list[int], text: str) -> None:
    assert tokens == cluster.script.tokens(len(PROMPT), TOKENS)
    assert text == cluster.script.text(len(PROMPT), TOKENS)


async def failure(cluster: Any, wire: pb.GenerateRequest) -> KVFerryError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.Generate(wire, timeout=20)
    return codec.error_from_wire(dict(caught.value.trailing_metadata())[codec.ERROR_METADATA_KEY])


async def test_killed_prefill_is_replaced_by_another(cluster: Any) -> None:
    await two_pairs(cluster)
    prefills = [cluster.workers["prefill-0"], cluster.workers["prefill-1"]]

    async def kill() -> None:
        victim = next(worker for worker in prefills if worker.requests)
        asyncio.get_running_loop().create_task(victim.stop())
        await asyncio.sleep(5)

    for worker in prefills:
        worker.on_prefill = once(kill)
    # One shared fault: only the first prefill dies.
    prefills[1].on_prefill = prefills[0].on_prefill
    tokens, text, last = await streamed(cluster, request())
    assert_whole(cluster, tokens, text)
    assert last.route.retries == 1
    assert sorted(len(worker.requests) for worker in prefills) == [1, 1]


@pytest.mark.parametrize("at", [1, 2, 9, 19])
async def test_killed_decode_is_replayed_without_a_token_twice(cluster: Any, at: int) -> None:
    await two_pairs(cluster)
    decodes = [cluster.workers["decode-0"], cluster.workers["decode-1"]]

    async def kill() -> None:
        victim = next(worker for worker in decodes if worker.requests)
        asyncio.get_running_loop().create_task(victim.stop())
        await asyncio.sleep(5)

    decodes[0].on_decode = decodes[1].on_decode = once(kill, at)
    tokens, text, last = await streamed(cluster, request())
    assert_whole(cluster, tokens, text)
    assert last.route.retries == 1
    assert last.usage.completion_tokens == TOKENS
    assert last.usage.cached_tokens == 3
    replayed = [worker for worker in decodes if worker.requests][-1]
    prefill_requests = [r for name in ("prefill-0", "prefill-1") for r in cluster.workers[name].requests]
    first, second = sorted(len(r.output_token_ids) for r in prefill_requests)
    assert first == 0
    assert 1 <= second <= at  # what was on the wire when the worker died is computed again
    assert {r.sampling.seed for r in [*prefill_requests, *replayed.requests]} == {7}
    assert len({r.request_id for r in prefill_requests}) == 2


async def test_killed_aggregated_worker_is_replayed_on_another(cluster: Any) -> None:
    workers = [await cluster.add("aggregated-0"), await cluster.add("aggregated-1")]

    async def kill() -> None:
        victim = next(worker for worker in workers if worker.requests)
        asyncio.get_running_loop().create_task(victim.stop())
        await asyncio.sleep(5)

    workers[0].on_decode = workers[1].on_decode = once(kill, 6)
    tokens, text, last = await streamed(cluster, request())
    assert_whole(cluster, tokens, text)
    assert last.route.retries == 1


async def test_stopped_worker_is_noticed_by_its_silence(cluster: Any) -> None:
    """As SIGSTOP does it: connections stay, nothing is answered."""
    await two_pairs(cluster)
    decodes = [cluster.workers["decode-0"], cluster.workers["decode-1"]]

    async def stop() -> None:
        victim = next(worker for worker in decodes if worker.requests)
        victim.paused = True
        await asyncio.sleep(30)

    decodes[0].on_decode = decodes[1].on_decode = once(stop, 3)
    tokens, text, last = await asyncio.wait_for(streamed(cluster, request()), 10)
    assert_whole(cluster, tokens, text)
    assert last.route.retries == 1


async def test_only_worker_dies_and_comes_back(make_cluster: Any) -> None:
    cluster = await make_cluster(worker_wait_s=5.0)
    _, decode = await cluster.pair()

    async def kill() -> None:
        asyncio.get_running_loop().create_task(restart())
        await asyncio.sleep(5)

    async def restart() -> None:
        await decode.stop()
        await cluster.until(lambda status: status["decode-0"] == "lost")
        decode.incarnation = "decode-0-2"
        await decode.start(cluster.addresses.grpc)

    decode.on_decode = once(kill, 4)
    tokens, text, last = await streamed(cluster, request())
    assert_whole(cluster, tokens, text)
    assert last.route.retries == 1


async def test_no_worker_is_waited_for_and_then_refused(cluster: Any) -> None:
    error = await failure(cluster, request())
    assert isinstance(error, UnavailableError)
    assert "within 0.5 s" in error.message
    assert "no worker has joined" in error.message


async def test_worker_that_comes_in_time_serves_the_waiting(make_cluster: Any) -> None:
    cluster = await make_cluster(worker_wait_s=5.0)
    waiting = asyncio.create_task(streamed(cluster, request()))
    await cluster.until_counts(queued=1)
    await cluster.add("aggregated-0")
    tokens, text, last = await waiting
    assert_whole(cluster, tokens, text)
    assert last.timings.total_ms >= last.timings.ttft_ms > 0


async def test_retry_budget_ends_in_unavailable_naming_the_last_failure(make_cluster: Any) -> None:
    cluster = await make_cluster(retry_budget=2)
    prefill, decode = await cluster.pair()

    async def fail(_: WorkerRequest, position: int) -> None:
        raise TransferError("the link is down")

    decode.on_decode = fail
    error = await failure(cluster, request())
    assert isinstance(error, UnavailableError)
    assert "3 attempts" in error.message
    assert "decode-0: the link is down" in error.message
    assert len(decode.requests) == 3
    # Each attempt got one token further, since prefill produced it and the client holds it.
    assert [len(r.output_token_ids) for r in decode.requests] == [1, 2, 3]
    async with asyncio.timeout(2):
        while len(prefill.released) < 3:
            await asyncio.sleep(0.01)
    assert sorted(prefill.released) == sorted(decode.handles)


async def test_budget_of_zero_means_one_attempt(make_cluster: Any) -> None:
    cluster = await make_cluster(retry_budget=0)
    worker = await cluster.add("aggregated-0")

    async def fail(_: WorkerRequest, __: int) -> None:
        raise UnavailableError("going down")

    worker.on_decode = fail
    error = await failure(cluster, request())
    assert "1 attempts" in error.message
    assert len(worker.requests) == 1


async def test_failed_worker_is_avoided_while_others_can_serve(cluster: Any) -> None:
    await two_pairs(cluster)
    bad, good = cluster.workers["decode-0"], cluster.workers["decode-1"]

    async def fail(_: WorkerRequest, position: int) -> None:
        raise TransferError("no")

    bad.on_decode = fail
    for _ in range(4):
        tokens, text, last = await streamed(cluster, request())
        assert_whole(cluster, tokens, text)
        assert last.route.decode == "decode-1"
        assert last.route.retries <= 1
    assert len(good.requests) == 4


async def test_refusal_by_a_worker_is_final(cluster: Any) -> None:
    prefill, _ = await cluster.pair()

    async def refuse(_: WorkerRequest, __: int) -> None:
        raise InvalidRequestError("penalties are not built", field="presence_penalty")

    prefill.on_prefill = refuse
    error = await failure(cluster, request())
    assert isinstance(error, InvalidRequestError)
    assert error.field == "presence_penalty"
    assert len(prefill.requests) == 1


async def test_full_worker_is_tried_again_then_the_client_is_told_when_to(make_cluster: Any) -> None:
    cluster = await make_cluster(retry_budget=1)
    worker = await cluster.add("aggregated-0")

    async def full(_: WorkerRequest, __: int) -> None:
        raise OverloadedError("no blocks", retry_after_s=0.1)

    worker.on_decode = full
    error = await failure(cluster, request())
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 0.1
    assert len(worker.requests) == 2


async def test_overload_is_refused_at_once_with_a_hint(make_cluster: Any) -> None:
    cluster = await make_cluster(max_running=2, max_queued=3)
    worker = await cluster.add("aggregated-0")
    go_on = asyncio.Event()

    async def wait(_: WorkerRequest, __: int) -> None:
        await go_on.wait()

    worker.on_decode = wait
    accepted = [asyncio.create_task(streamed(cluster, request())) for _ in range(5)]
    await cluster.until_counts(decoding=2, queued=3)
    error = await failure(cluster, request())
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s >= 1
    assert "2 requests running, 3 waiting" in error.message
    assert len(worker.requests) == 2
    go_on.set()
    for tokens, text, _ in await asyncio.gather(*accepted):
        assert_whole(cluster, tokens, text)


async def test_workers_batch_size_bounds_what_runs(make_cluster: Any) -> None:
    cluster = await make_cluster()
    worker = await cluster.add("aggregated-0", max_batch=2)
    most = 0
    running = 0

    async def count(worker_request: WorkerRequest, position: int) -> None:
        nonlocal most, running
        running += position == 0
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= position == TOKENS - 1

    worker.on_decode = count
    await asyncio.gather(*(streamed(cluster, request()) for _ in range(8)))
    assert most == 2


async def test_decode_serves_alone_when_no_prefill_is_left(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    await prefill.stop()
    await cluster.until(lambda status: status["prefill-0"] == "lost")
    tokens, text, last = await streamed(cluster, request())
    assert_whole(cluster, tokens, text)
    assert (last.route.prefill, last.route.decode, last.route.disaggregated) == ("decode-0", "decode-0", False)
    assert decode.handles == [b""]


async def test_many_streams_survive_a_killed_decode(cluster: Any) -> None:
    await two_pairs(cluster)
    decodes = [cluster.workers["decode-0"], cluster.workers["decode-1"]]

    async def kill() -> None:
        asyncio.get_running_loop().create_task(decodes[0].stop())
        await asyncio.sleep(0)

    decodes[0].on_decode = once(kill, 10)
    answers = await asyncio.gather(*(streamed(cluster, request()) for _ in range(16)))
    for tokens, text, _ in answers:
        assert_whole(cluster, tokens, text)
    await cluster.until_counts(finished=16, queued=0, prefilling=0, transferring=0, decoding=0)


async def test_three_hundred_cancels_leave_room_for_the_next(cluster: Any) -> None:
    prefill, _ = await cluster.pair()

    async def hang(worker_request: WorkerRequest, __: int) -> None:
        if worker_request.sampling.max_tokens == TOKENS:
            await asyncio.sleep(60)

    prefill.on_prefill = hang
    calls = [cluster.stub.Generate(request(), timeout=60) for _ in range(300)]
    await cluster.until_counts(prefilling=8, queued=292)
    for call in calls:
        call.cancel()
    await cluster.until_counts(cancelled=300, queued=0, prefilling=0)
    answer = await cluster.stub.Generate(request(5), timeout=5)
    assert list(answer.token_ids) == cluster.script.tokens(len(PROMPT), 5)
