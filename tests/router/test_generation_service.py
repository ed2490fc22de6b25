from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvferry.core import ErrorCode, InternalError, KVFerryError, ModelLimits, WorkerRequest, codec
from kvferry.proto import generation_pb2 as pb

PROMPT = [1, 2, 3, 4, 5]


def request(max_tokens: int = 12, **sampling: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=max_tokens, **sampling)
    return pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), sampling=params)


def chat_of(*contents: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


async def failure(call: Any) -> tuple[grpc.StatusCode, KVFerryError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    detail = dict(caught.value.trailing_metadata())[codec.ERROR_METADATA_KEY]
    error = codec.error_from_wire(detail)
    assert caught.value.code().name == error.code.name
    assert caught.value.details() == error.message
    return caught.value.code(), error


async def remaining(stream: Any) -> list[pb.GenerateResponse]:
    """What is left of a stream that was begun with `read`."""
    messages = []
    while (message := await stream.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def test_whole_answer_of_a_pair(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    response = await cluster.stub.Generate(request(logprobs=1), timeout=10)
    assert list(response.token_ids) == cluster.script.tokens(5, 12)
    assert response.text == cluster.script.text(5, 12)
    assert response.finish_reason == pb.FINISH_REASON_LENGTH
    assert [entry.token_id for entry in response.logprobs] == list(response.token_ids)
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 12, 3)
    route = response.route
    assert (route.prefill, route.decode, route.disaggregated, route.retries) == ("prefill-0", "decode-0", True, 0)
    assert route.transferred_bytes == 4096
    timings = response.timings
    assert (timings.prefill_ms, timings.transfer_ms, timings.decode_ms) == (2, 3, 4)
    assert 0 < timings.ttft_ms <= timings.total_ms
    assert prefill.requests[0].request_id == decode.requests[0].request_id == response.request_id
    assert decode.handles == [f"prefill-0-1/{response.request_id}".encode()]
    assert decode.requests[0].output_token_ids == tuple(response.token_ids[:1])
    assert prefill.released == []
    assert prefill.cancelled == decode.cancelled == []


async def test_workers_get_a_complete_request(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    await cluster.stub.Generate(request(4), timeout=10)
    await cluster.stub.Generate(request(4), timeout=10)
    first, second = (worker_request.sampling for worker_request in prefill.requests)
    assert first.seed is not None
    assert second.seed not in (None, first.seed)
    assert decode.requests[0].sampling.seed == first.seed
    assert 0 < decode.requests[0].deadline_s < 11  # gRPC rounds a deadline up
    wire = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), cache_salt="s")
    await cluster.stub.Generate(wire, timeout=10)
    assert prefill.requests[2].sampling.max_tokens == 200 - 5
    assert prefill.requests[2].scope == "s"


async def test_stream_sends_the_first_token_before_decode_has_one(cluster: Any) -> None:
    _, decode = await cluster.pair()
    go_on = asyncio.Event()

    async def wait(_: WorkerRequest, __: int) -> None:
        await go_on.wait()

    decode.on_decode = wait
    stream = cluster.stub.GenerateStream(request(6), timeout=10)
    first = await stream.read()
    assert list(first.token_ids) == cluster.script.tokens(5, 1)
    assert first.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    go_on.set()
    rest = await remaining(stream)
    assert [token for message in [first, *rest] for token in message.token_ids] == cluster.script.tokens(5, 6)
    assert "".join(message.text for message in [first, *rest]) == cluster.script.text(5, 6)
    assert all("\ufffd" not in message.text for message in rest[:-1])
    assert [message.HasField("route") for message in [first, *rest]] == [False] * (len(rest)) + [True]


async def test_request_that_ends_at_its_first_token_needs_no_decode(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    response = await cluster.stub.Generate(request(1), timeout=10)
    assert len(response.token_ids) == 1
    assert response.finish_reason == pb.FINISH_REASON_LENGTH
    assert (response.route.prefill, response.route.decode, response.route.disaggregated) == ("prefill-0", "", False)
    assert decode.requests == []
    assert prefill.released == []


async def test_aggregated_worker_serves_whole_requests(cluster: Any) -> None:
    worker = await cluster.add("aggregated-0")
    response = await cluster.stub.Generate(request(), timeout=10)
    assert list(response.token_ids) == cluster.script.tokens(5, 12)
    assert response.usage.cached_tokens == 5
    assert (response.route.prefill, response.route.decode) == ("aggregated-0", "aggregated-0")
    assert not response.route.disaggregated
    assert response.timings.prefill_ms == 9
    assert worker.handles == [b""]


async def test_stop_string_ends_the_text(cluster: Any) -> None:
    await cluster.pair()
    response = await cluster.stub.Generate(request(60, stop=["fox"]), timeout=10)
    whole = cluster.script.text(5, 60)
    assert response.text == whole[: whole.index("fox")]
    assert response.finish_reason == pb.FINISH_REASON_STOP


async def test_text_and_chat_prompts(cluster: Any) -> None:
    prefill, _ = await cluster.pair()
    params = pb.SamplingParams(max_tokens=2)
    await cluster.stub.Generate(pb.GenerateRequest(prompt="the fox", sampling=params, model="fake"), timeout=10)
    assert prefill.requests[0].prompt_token_ids == tuple(cluster.tokenizer.encode("the fox"))
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    await cluster.stub.Generate(pb.GenerateRequest(chat=chat, sampling=params), timeout=10)
    assert cluster.tokenizer.decode(prefill.requests[1].prompt_token_ids) == "user: hi\n>"
    tokens = await cluster.stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=10)
    assert tuple(tokens.token_ids) == prefill.requests[1].prompt_token_ids
    assert tokens.max_context_tokens == 200


async def test_tokenize_takes_long_texts_up_to_a_limit(make_cluster: Any) -> None:
    cluster = await make_cluster(limits=ModelLimits(300, 2000))
    text = "fox " * 2000
    long = await cluster.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=10)
    assert list(long.token_ids) == cluster.tokenizer.encode(text)
    limit = 2000 * cluster.tokenizer.longest_token_chars
    for wire, field in (
        (pb.TokenizeRequest(text="x" * (limit + 1)), "text"),
        (pb.TokenizeRequest(chat=chat_of("x" * (limit // 2), "x" * (limit // 2), "xx")), "messages"),
        (pb.TokenizeRequest(chat=chat_of(*["x"] * 2001)), "messages"),
    ):
        status, error = await failure(cluster.stub.Tokenize(wire, timeout=10))
        assert (status, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert str(2000 if "2001" in error.message else limit) in error.message


async def test_prompt_too_long_for_any_tokenizer_is_never_tokenized(make_cluster: Any, held_threads: Any) -> None:
    cluster = await make_cluster(limits=ModelLimits(300, 10_000))
    limit = 10_000 * cluster.tokenizer.longest_token_chars
    for wire, field in (
        (pb.GenerateRequest(prompt="a " * 7_500_000), "prompt"),
        (pb.GenerateRequest(chat=chat_of("a " * 7_500_000)), "messages"),
    ):
        for call in (cluster.stub.Generate(wire), cluster.stub.GenerateStream(wire).read()):
            status, error = await failure(call)
            assert (status, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            assert f"15000000 characters; the limit is {limit}" in error.message
    assert held_threads.encoded == []


async def test_long_prompts_wait_in_a_bounded_queue_that_deadlines_and_cancels_empty(
    make_cluster: Any, held_threads: Any
) -> None:
    cluster = await make_cluster(limits=ModelLimits(300, 10_000), max_queued=3)
    await cluster.add("aggregated-0")
    ask = pb.GenerateRequest(prompt="a " * 2000)
    running = [cluster.stub.Generate(ask, timeout=20) for _ in range(2)]
    await held_threads.begun(2)
    waiting = [cluster.stub.Generate(ask, timeout=0.5), cluster.stub.Generate(ask), cluster.stub.Generate(ask)]
    status, error = await failure(waiting[0])
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "deadline" in error.message
    waiting.append(cluster.stub.Generate(ask))
    await asyncio.sleep(0.2)
    status, error = await failure(cluster.stub.Generate(ask))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after_s > 0
    assert "router.max_queued" in error.message
    short = await cluster.stub.Generate(request(), timeout=10)  # nobody else waits for them
    assert len(short.token_ids) == 12
    for call in waiting[1:]:
        call.cancel()
    await asyncio.sleep(0.2)
    held_threads.go_on.set()
    assert [len((await call).token_ids) for call in running] == [256, 256]
    assert held_threads.encoded == [4000, 4000]


async def test_two_requests_with_one_client_id_are_both_right(cluster: Any) -> None:
    prefill, _ = await cluster.pair()
    wire = request(20)
    wire.request_id = "same"
    answers = await asyncio.gather(*(cluster.stub.Generate(wire, timeout=10) for _ in range(2)))
    assert [list(answer.token_ids) for answer in answers] == [cluster.script.tokens(5, 20)] * 2
    assert {answer.request_id for answer in answers} == {"same"}
    assert len({worker_request.request_id for worker_request in prefill.requests}) == 2


BAD = [
    (pb.GenerateRequest(), ErrorCode.INVALID_ARGUMENT, "prompt", "missing"),
    (pb.GenerateRequest(prompt=""), ErrorCode.INVALID_ARGUMENT, "prompt", "empty"),
    (
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1] * 200)),
        ErrorCode.INVALID_ARGUMENT,
        "prompt",
        "the limit is 199",
    ),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 300])), ErrorCode.INVALID_ARGUMENT, "prompt", "[0, 300)"),
    (pb.GenerateRequest(chat=pb.ChatMessages()), ErrorCode.INVALID_ARGUMENT, "messages", "empty"),
    (request(temperature=-1.0), ErrorCode.INVALID_ARGUMENT, "temperature", "between 0 and 100"),
    (request(top_p=1.5), ErrorCode.INVALID_ARGUMENT, "top_p", "at most 1"),
    (request(0), ErrorCode.INVALID_ARGUMENT, "max_tokens", "between 1 and 2147483647"),
    (request(196), ErrorCode.INVALID_ARGUMENT, "max_tokens", "room for 195"),
    (request(5, min_tokens=6), ErrorCode.INVALID_ARGUMENT, "min_tokens", "at most max_tokens (5)"),
    (request(stop=[""]), ErrorCode.INVALID_ARGUMENT, "stop", "non-empty"),
    (request(stop_token_ids=[300]), ErrorCode.INVALID_ARGUMENT, "stop_token_ids", "[0, 300)"),
    (request(logit_bias={301: 1.0}), ErrorCode.INVALID_ARGUMENT, "logit_bias", "[0, 300)"),
    (request(logprobs=21), ErrorCode.INVALID_ARGUMENT, "logprobs", "between 0 and 20"),
    (pb.GenerateRequest(prompt="x", model="gpt"), ErrorCode.NOT_FOUND, "model", "'fake'"),
    (pb.GenerateRequest(prompt="x", request_id="i" * 257), ErrorCode.INVALID_ARGUMENT, "request_id", "256"),
]


@pytest.mark.parametrize(("wire", "code", "field", "needle"), BAD, ids=lambda value: getattr(value, "name", None))
async def test_bad_input_is_named_and_reaches_no_worker(
    cluster: Any, wire: pb.GenerateRequest, code: ErrorCode, field: str, needle: str
) -> None:
    worker = await cluster.add("aggregated-0")
    status, error = await failure(cluster.stub.Generate(wire, timeout=10))
    assert (status.name, error.field) == (code.name, field)
    assert needle in error.message
    stream_status, _ = await failure(cluster.stub.GenerateStream(wire, timeout=10).read())
    assert stream_status is status
    assert worker.requests == []


async def test_cancel_in_the_middle_of_the_prompt_reaches_the_worker(cluster: Any) -> None:
    prefill, decode = await cluster.pair()
    started = asyncio.Event()

    async def hang(_: WorkerRequest, __: int) -> None:
        started.set()
        await asyncio.sleep(30)

    prefill.on_prefill = hang
    call = cluster.stub.Generate(request(), timeout=10)
    await asyncio.wait_for(started.wait(), 5)
    call.cancel()
    await cluster.until_counts(cancelled=1, prefilling=0)
    await asyncio.sleep(0.1)
    assert prefill.cancelled == [prefill.requests[0].request_id]
    assert prefill.abandoned == prefill.cancelled  # its answer may have been on its way
    assert decode.requests == []


async def test_cancel_before_the_pull_releases_the_hand_off(cluster: Any) -> None:
    prefill, decode = await cluster.pair()

    async def hang(_: WorkerRequest, __: int) -> None:
        await asyncio.sleep(30)

    decode.on_decode = hang
    stream = cluster.stub.GenerateStream(request(), timeout=10)
    await stream.read()
    await cluster.until_counts(transferring=1)
    async with asyncio.timeout(5):
        while not decode.requests:
            await asyncio.sleep(0.01)
    stream.cancel()
    await cluster.until_counts(cancelled=1, transferring=0)
    async with asyncio.timeout(2):
        while not prefill.released or not decode.cancelled:
            await asyncio.sleep(0.01)
    assert prefill.released == decode.handles


async def test_cancel_while_decoding_reaches_the_worker_and_releases_nothing(cluster: Any) -> None:
    prefill, decode = await cluster.pair()

    async def slow(_: WorkerRequest, position: int) -> None:
        await asyncio.sleep(30 if position == 4 else 0)

    decode.on_decode = slow
    stream = cluster.stub.GenerateStream(request(), timeout=10)
    for _ in range(4):
        await stream.read()
    stream.cancel()
    await cluster.until_counts(cancelled=1, decoding=0)
    await asyncio.sleep(0.1)
    assert decode.cancelled == [decode.requests[0].request_id]
    assert prefill.released == []


async def test_deadline_ends_the_request_on_the_workers(make_cluster: Any) -> None:
    cluster = await make_cluster(request_timeout_s=0.5)
    _, decode = await cluster.pair()

    async def hang(_: WorkerRequest, __: int) -> None:
        await asyncio.sleep(30)

    decode.on_decode = hang
    status, error = await failure(cluster.stub.Generate(request()))
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "deadline" in error.message
    async with asyncio.timeout(2):
        while not decode.cancelled:
            await asyncio.sleep(0.01)


async def test_a_clients_own_deadline_ends_the_call_with_the_routers_reason(cluster: Any) -> None:
    _, decode = await cluster.pair()

    async def hang(_: WorkerRequest, position: int) -> None:
        await asyncio.sleep(30 if position == 3 else 0)

    decode.on_decode = hang
    for timeout_s in (0.3, 1.0):
        stream = cluster.stub.GenerateStream(request(), timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await remaining(stream)
        assert codec.error_from_wire(dict(caught.value.trailing_metadata())[codec.ERROR_METADATA_KEY]).code is (
            ErrorCode.DEADLINE_EXCEEDED
        )
        status, _ = await failure(cluster.stub.Generate(request(), timeout=timeout_s))
        assert status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_internal_errors_show_an_id_and_no_trace(cluster: Any) -> None:
    worker = await cluster.add("aggregated-0")

    async def bug(_: WorkerRequest, position: int) -> None:
        if position == 2:
            raise ZeroDivisionError("secret detail")
        if position == 0 and len(worker.requests) == 2:
            raise InternalError("the step failed.")

    worker.on_decode = bug
    status, error = await failure(cluster.stub.Generate(request(), timeout=10))
    assert status is grpc.StatusCode.INTERNAL
    assert "secret" not in error.message
    assert worker.requests[0].request_id in error.message
    _, error = await failure(cluster.stub.Generate(request(), timeout=10))
    assert "the step failed." in error.message
    assert worker.requests[1].request_id in error.message
    assert len(worker.requests) == 2  # a bug is not tried again


async def test_slow_client_stalls_nobody(cluster: Any) -> None:
    worker = await cluster.add("aggregated-0")
    stalled = cluster.stub.GenerateStream(request(150), timeout=20)
    await stalled.read()
    answers = await asyncio.gather(*(cluster.stub.Generate(request(20), timeout=10) for _ in range(5)))
    assert all(list(answer.token_ids) == cluster.script.tokens(5, 20) for answer in answers)
    rest = await remaining(stalled)
    assert sum(len(message.token_ids) for message in rest) == 149
    assert worker.cancelled == []
