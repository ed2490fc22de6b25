"""More work than there is room for: all that is taken in ends golden, the rest is refused by name, nothing is lost."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plain_cluster import GREEDY, PlainCluster

from kvferry.cli.client import Completed, token_request
from kvferry.core import ErrorCode, FinishReason, KVFerryError, OverloadedError

BLOCK = 16
BLOCKS = 12
RUNNING, QUEUED = 4, 6

Prompt = Callable[[int, int], list[int]]


@pytest.fixture(scope="module", params=["V2", "V1"])
def tiny(request: Any, start_plain: Any) -> Iterator[PlainCluster]:
    """Pools of 192 tokens."""
    cluster = start_plain(1, 1, BLOCKS, **{"kv_cache.manager": request.param, "transceiver.lease_s": 2})
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def narrow(start_plain: Any) -> Iterator[PlainCluster]:
    """Room for few requests at once, and for few more in the queue."""
    cluster = start_plain(1, 1, 256, **{"router.max_running": RUNNING, "router.max_queued": QUEUED})
    yield cluster
    cluster.close()


def test_outputs_grow_past_the_pool(tiny: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """Room for two of four after their transfers, and for one at its full length: none hangs, none is wrong."""
    sampling = replace(GREEDY, max_tokens=120)
    prompts = [prompt(60, n) for n in range(4)]
    for ids, done in zip(prompts, tiny.complete_all(prompts, sampling), strict=True):
        assert (len(done.token_ids), done.finish_reason) == (120, FinishReason.LENGTH)
        golden(ids, done)
    assert "preempted" in tiny.servers["decode-0"].log.read_text()
    tiny.assert_baseline(within_s=1.5)
    # What the preempted ones left in the prefix cache is right too.
    for ids in prompts:
        golden(ids, tiny.complete(ids))
    tiny.assert_baseline(within_s=1.5)


def test_many_more_prompts_than_blocks(tiny: PlainCluster, golden: Any, prompt: Prompt) -> None:
    prompts = [prompt(5 + 7 * (n % 9), 50 + n) for n in range(30)]
    for ids, done in zip(prompts, tiny.complete_all(prompts), strict=True):
        golden(ids, done)
    tiny.assert_baseline(within_s=1.5)


def test_a_request_the_pool_can_never_hold_is_refused(tiny: PlainCluster, prompt: Prompt) -> None:
    with pytest.raises(KVFerryError, match="192") as caught:
        tiny.complete(prompt(100, 70), replace(GREEDY, max_tokens=100))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "max_tokens")
    tiny.assert_baseline(within_s=1.5)


def test_a_flood_is_refused_beyond_the_queue(narrow: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """Those taken in are right and as many as fit; the others are told at once when to come back."""
    prompts = [prompt(40, 100 + n) for n in range(2 * (RUNNING + QUEUED) + 20)]

    def ask(ids: list[int]) -> Completed | KVFerryError:
        try:
            return narrow.complete(ids, replace(GREEDY, max_tokens=100))
        except KVFerryError as error:
            return error

    with ThreadPoolExecutor(len(prompts)) as threads:
        outcomes = list(threads.map(ask, prompts))
    refused = [outcome for outcome in outcomes if isinstance(outcome, KVFerryError)]
    assert len(outcomes) - len(refused) >= RUNNING + QUEUED
    assert refused
    for error in refused:
        assert isinstance(error, OverloadedError)
        assert "router.max_queued" in error.message
        assert error.retry_after_s >= 1
    for ids, outcome in zip(prompts, outcomes, strict=True):
        if isinstance(outcome, Completed):
            golden(ids, outcome)
    assert narrow.router_status().router.queue_depth == 0
    narrow.assert_baseline(within_s=1.5)


def test_a_flood_over_http_gets_429_and_when_to_retry(narrow: PlainCluster, prompt: Prompt) -> None:
    def ask(ids: list[int]) -> tuple[int, str | None]:
        body = json.dumps({"model": str(narrow.model_dir), "prompt": ids, "max_tokens": 100, "temperature": 0})
        request = urllib.request.Request(
            f"http://{narrow.http}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status), None
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get("Retry-After")

    prompts = [prompt(40, 200 + n) for n in range(40)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, prompts))
    assert {code for code, _ in answers} == {200, 429}
    assert all(retry is not None and int(retry) >= 1 for code, retry in answers if code == 429)
    narrow.assert_baseline(within_s=1.5)


def test_short_requests_leave_nothing_behind(pair: PlainCluster, prompt: Prompt) -> None:
    """Descriptors, threads and memory of every process stay as they are over 500 requests, a third of them left."""

    def some(count: int, seed: int) -> None:
        for at in range(0, count, 50):
            with pair.client() as client, ThreadPoolExecutor(50) as threads:
                list(threads.map(lambda n: one(client, n), range(seed + at, seed + at + 50)))

    def one(client: Any, n: int) -> None:
        stream = client.stream(token_request(prompt(20 + n % 30, n), replace(GREEDY, max_tokens=8)))
        for _ in stream:
            if n % 3 == 0:
                stream.close()
                return

    some(200, 10_000)
    pair.assert_baseline()
    before = {name: footprint(server.pid) for name, server in pair.servers.items()}
    some(500, 20_000)
    pair.assert_baseline()
    for name, server in pair.servers.items():
        (files, threads, kib), (files_now, threads_now, kib_now) = before[name], footprint(server.pid)
        assert files_now <= files + 2, name
        assert threads_now <= threads + 2, name
        assert kib_now - kib < 20 * 500, f"{name} grew by {kib_now - kib} KiB"  # far less than 20 KiB a request


def footprint(pid: int) -> tuple[int, int, int]:
    """Open descriptors, threads, resident KiB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])
