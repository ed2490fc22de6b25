from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvferry.core import ModelLimits, TransferError, WorkerRequest

PROMPT = [1, 2, 3, 4, 5]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
async def http(cluster: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.addresses.http}", timeout=20) as client:
        yield client


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    """The data of every server-sent event, JSON decoded but for the closing [DONE]."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]


async def test_completion(cluster: Any, http: httpx.AsyncClient) -> None:
    await cluster.pair()
    response = await http.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 12, "model": "fake", "logprobs": 1})
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-req-")
    (choice,) = body["choices"]
    assert choice["text"] == cluster.script.text(5, 12)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 12
    assert choice["logprobs"]["text_offset"][0] == 0
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert body["kvferry"]["route"]["decode"] == "decode-0"
    assert body["kvferry"]["route"]["transferred_bytes"] == 4096
    assert body["kvferry"]["timings"]["ttft_ms"] > 0


async def test_completion_stream(cluster: Any, http: httpx.AsyncClient) -> None:
    await cluster.pair()
    *chunks, usage, done = await events(
        http, COMPLETIONS, prompt=PROMPT, max_tokens=12, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cluster.script.text(5, 12)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 11 + ["length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)


async def test_chat(cluster: Any, http: httpx.AsyncClient) -> None:
    worker = await cluster.add("aggregated-0")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 1}
    answer = (await http.post(CHAT, json=body, headers={"x-request-id": "mine"})).json()
    prompt = worker.requests[0].prompt_token_ids
    assert cluster.tokenizer.decode(prompt) == "user: hi\n>"
    text = cluster.script.text(len(prompt), 6)
    assert answer["id"] == "chatcmpl-mine"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 6
    assert tokens[0]["top_logprobs"][0]["token"] == tokens[0]["token"]
    opening, *chunks, done = await events(http, CHAT, **body)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
    assert chunks[-1]["object"] == "chat.completion.chunk"
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "param", "needle"),
    [
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [1] * 200}, 400, "prompt", "199"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "temperature", "between 0 and 100"),
        (COMPLETIONS, {"prompt": "x", "model": "gpt"}, 404, "model", "'fake' is"),
        (COMPLETIONS, {"prompt": "a\ud800"}, 400, None, ""),
        (COMPLETIONS, {"prompt": "x", "top_k": 2**31}, 400, "top_k", "2147483647"),
        (COMPLETIONS, {"prompt": "x", "temperature": 10**400}, 400, "temperature", "between 0 and 100"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, 400, "messages", "knows system, user, assistant"),
        (CHAT, {"messages": []}, 400, "messages", "empty"),
        (CHAT, {"messages": [{"role": "u", "content": "x"}], "n": 3}, 400, "n", "not supported"),
    ],
)
async def test_refusals(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None, needle: str, stream: bool
) -> None:
    response = await http.post(path, content=json.dumps({**body, "stream": stream}))
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert needle in error["message"]
    assert error["request_id"] == response.headers["x-request-id"]


async def test_no_worker_and_overload_have_their_statuses(make_cluster: Any) -> None:
    cluster = await make_cluster(max_running=1, max_queued=0, worker_wait_s=0.1)
    async with httpx.AsyncClient(base_url=f"http://{cluster.addresses.http}", timeout=20) as client:
        body = {"prompt": PROMPT, "max_tokens": 5}
        response = await client.post(COMPLETIONS, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "UNAVAILABLE")
        worker = await cluster.add("aggregated-0")
        go_on = asyncio.Event()

        async def wait(_: WorkerRequest, __: int) -> None:
            await go_on.wait()

        worker.on_decode = wait
        running = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await cluster.until_counts(decoding=1)
        refused = await client.post(COMPLETIONS, json={**body, "stream": True})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        go_on.set()
        assert (await running).status_code == 200


async def test_failing_stream_ends_with_an_error_event(make_cluster: Any) -> None:
    cluster = await make_cluster(retry_budget=0)
    worker = await cluster.add("aggregated-0")

    async def fail(_: WorkerRequest, position: int) -> None:
        if position == 3:
            raise TransferError("the link is down")

    worker.on_decode = fail
    async with httpx.AsyncClient(base_url=f"http://{cluster.addresses.http}", timeout=20) as client:
        *chunks, last = await events(client, COMPLETIONS, prompt=PROMPT, max_tokens=9)
        assert len(chunks) == 3
        assert last["error"]["code"] == "UNAVAILABLE"
        assert "the link is down" in last["error"]["message"]
        whole = await client.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 9})
        assert whole.status_code == 503
        assert "choices" not in whole.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_cancels_the_request(cluster: Any, http: httpx.AsyncClient, stream: bool) -> None:
    worker = await cluster.add("aggregated-0")

    async def slow(_: WorkerRequest, position: int) -> None:
        await asyncio.sleep(30 if position == 2 else 0)

    worker.on_decode = slow
    asking = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": PROMPT, "stream": stream}))
    await cluster.until_counts(decoding=1)
    async with asyncio.timeout(5):
        while not worker.requests:
            await asyncio.sleep(0.01)
    asking.cancel()
    await cluster.until_counts(cancelled=1, decoding=0)
    async with asyncio.timeout(1):
        while not worker.cancelled:
            await asyncio.sleep(0.01)


async def test_models_and_unknown_paths(http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()
    assert [(entry["id"], entry["max_model_len"]) for entry in models["data"]] == [("fake", 200)]
    missing = await http.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "NOT_FOUND")
    wrong = await http.get(COMPLETIONS)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "INVALID_ARGUMENT")


async def test_oversized_body_is_refused(cluster: Any, http: httpx.AsyncClient) -> None:
    limit = 2**20 + 6 * 200 * cluster.tokenizer.longest_token_chars
    response = await http.post(COMPLETIONS, content=b" " * (limit + 1))
    assert response.status_code == 400
    assert f"limit of {limit} bytes" in response.json()["error"]["message"]


async def test_hanging_up_while_the_prompt_waits_to_be_tokenized_drops_it(make_cluster: Any, held_threads: Any) -> None:
    cluster = await make_cluster(limits=ModelLimits(300, 10_000))
    async with httpx.AsyncClient(base_url=f"http://{cluster.addresses.http}", timeout=20) as client:
        asks = [asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a " * 2000})) for _ in range(6)]
        await held_threads.begun(2)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        await asyncio.sleep(0.2)
        held_threads.go_on.set()
        refused = await client.post(COMPLETIONS, json={"prompt": "a " * 3000})
        assert refused.status_code == 503  # tokenized, and there is no worker
    assert held_threads.encoded == [4000, 4000, 6000]


async def test_health_follows_the_workers(cluster: Any, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 503
    worker = await cluster.add("aggregated-0")
    response = await http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "workers": {"aggregated-0": "ready"}})
    await worker.stop()
    await cluster.until(lambda status: status["aggregated-0"] == "lost")
    assert (await http.get("/health")).status_code == 503


async def test_server_info_says_who_runs_with_what(cluster: Any, http: httpx.AsyncClient) -> None:
    await cluster.pair()
    info = (await http.get("/server_info")).json()
    assert info["limits"] == {"vocab_size": 300, "max_context_tokens": 200}
    decode, prefill = info["workers"]
    assert (decode["name"], prefill["name"]) == ("decode-0", "prefill-0")
    assert decode["resolution"]["transceiver"] == "NIXL/PYTHON"
    assert decode["resolution"]["manager_source"] == "model"
    assert decode["peers"] == [prefill["endpoint"]]
    assert (decode["cache"]["reused_tokens"], decode["cache"]["evicted_blocks"]) == (20, 7)
    assert decode["tiers"] == [{"tier": "host", "total": 10, "free": 3, "kept": 5, "parked": 2}]


async def test_metrics(cluster: Any, http: httpx.AsyncClient) -> None:
    await cluster.pair()
    await http.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 7})
    await http.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 1})
    text = (await http.get("/metrics")).text
    lines = set(text.splitlines())
    assert (
        'kvferry_worker_info{kv_manager="V2",kv_manager_source="model",model="LlamaForCausalLM",role="decode",'
        'transceiver="NIXL/PYTHON",transceiver_source="model",worker="decode-0"} 1.0'
    ) in lines
    for line in (
        'kvferry_requests_total{state="finished"} 2.0',
        'kvferry_requests_live{state="decoding"} 0.0',
        'kvferry_routed_total{route="disaggregated"} 1.0',
        'kvferry_routed_total{route="single"} 1.0',
        "kvferry_output_tokens_total 8.0",
        "kvferry_prompt_tokens_total 10.0",
        "kvferry_transferred_bytes_total 4096.0",
        "kvferry_ttft_seconds_count 2.0",
        "kvferry_inter_token_seconds_count 6.0",
        "kvferry_queue_depth 0.0",
        'kvferry_worker_up{role="prefill",state="ready",worker="prefill-0"} 1.0',
        'kvferry_worker_blocks{kind="free",worker="prefill-0"} 90.0',
        'kvferry_worker_prompt_tokens_total{worker="prefill-0"} 50.0',
        'kvferry_worker_prefix_hit_tokens_total{worker="prefill-0"} 20.0',
        'kvferry_worker_evicted_blocks_total{worker="decode-0"} 7.0',
        'kvferry_worker_suspensions_total{worker="decode-0"} 2.0',
        'kvferry_worker_tier_blocks{kind="free",tier="device",worker="decode-0"} 60.0',
        'kvferry_worker_tier_blocks{kind="used",tier="device",worker="decode-0"} 10.0',
        'kvferry_worker_tier_blocks{kind="cached",tier="device",worker="decode-0"} 30.0',
        'kvferry_worker_tier_blocks{kind="used",tier="host",worker="decode-0"} 2.0',
        'kvferry_worker_tier_blocks{kind="cached",tier="host",worker="decode-0"} 5.0',
    ):
        assert line in lines, line
