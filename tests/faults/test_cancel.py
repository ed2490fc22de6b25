"""Clients that go away at every moment: both workers are back at baseline at once, and nobody else notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from plain_cluster import GREEDY, PlainCluster

from kvferry.cli.client import token_request
from kvferry.core import SamplingParams, WorkerRequest, codec
from kvferry.proto import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

LONG = 1700
MANY = replace(GREEDY, max_tokens=300)

Prompt = Callable[[int, int], list[int]]


@pytest.fixture(scope="module", params=["prefill_first", "decode_first"])
def pair(request: pytest.FixtureRequest, start_plain: Any) -> Iterator[PlainCluster]:
    """One prefill worker that takes prompts in small steps and one decode worker, under either schedule."""
    settings = {"transceiver.lease_s": 2.0, "prefill.engine.step_token_budget": 16, "engine.max_batch": 256}
    cluster = start_plain(1, 1, 256, **settings, **{"router.schedule": request.param})
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def as_before(pair: PlainCluster, golden: Any, prompt: Prompt) -> Iterator[None]:
    """After each test: no block is missing well before a lease would have brought it back, and a probe is answered."""
    yield
    pair.assert_baseline(within_s=1.5)
    ids = prompt(33, 1)
    golden(ids, pair.complete(ids))
    pair.assert_baseline(within_s=1.5)


class Clients:
    """Many streams on one connection, each cancelled by hand."""

    def __init__(self, cluster: PlainCluster) -> None:
        self._channel = grpc.insecure_channel(cluster.grpc)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self.calls: list[Any] = []

    def start(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        self.calls += [self._stub.GenerateStream(token_request(ids, sampling), timeout=60) for ids in prompts]

    def cancel(self) -> None:
        for call in self.calls:
            call.cancel()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._channel.close()


def running(pair: PlainCluster, worker: str, *states: str) -> int:
    requests = pair.describe(worker).requests
    return sum(requests.get(state, 0) for state in states)


def test_half_way_through_a_long_prompt(pair: PlainCluster, prompt: Prompt) -> None:
    before = running(pair, "prefill-0", "cancelled")
    with Clients(pair) as clients:
        clients.start([prompt(LONG, 40)], MANY)
        pair.eventually(lambda: pair.describe("prefill-0").blocks.free < 200, "prefill does not get going")
        clients.cancel()
        pair.assert_baseline(within_s=1.0)
    assert running(pair, "prefill-0", "cancelled") == before + 1  # counted once


def test_a_cancelled_long_prompt_delays_nobody(pair: PlainCluster, prompt: Prompt) -> None:
    """The next short request's first token comes as soon as on an idle worker, give or take a step."""
    idle_ms = min(pair.complete(prompt(20, 50 + n)).timings["ttft_ms"] for n in range(3))
    with Clients(pair) as clients:
        clients.start([prompt(LONG, 60)], MANY)
        pair.eventually(lambda: running(pair, "prefill-0", "running") == 1, "prefill does not get going")
        clients.cancel()
        after_ms = min(pair.complete(prompt(20, 61 + n)).timings["ttft_ms"] for n in range(2))
    whole_ms = pair.complete(prompt(LONG, 62), replace(GREEDY, max_tokens=1)).timings["ttft_ms"]
    assert after_ms < max(2 * idle_ms, whole_ms / 4), (idle_ms, after_ms, whole_ms)


@pytest.mark.parametrize("delay_ms", [0, 4, 8, 12, 16, 20, 30, 40, 60, 100])
def test_at_every_moment_of_a_request(pair: PlainCluster, prompt: Prompt, delay_ms: int) -> None:
    """Around decode's admission too: a hand-off that nobody takes must not wait for its lease."""
    with Clients(pair) as clients:
        for n in range(10):
            clients.start([prompt(60, 1000 * delay_ms + n)], MANY)
            time.sleep(0.001 * n)
        time.sleep(delay_ms / 1000)
        clients.cancel()
        pair.assert_baseline(within_s=1.0)


def test_when_decode_has_not_seen_the_request_yet(pair: PlainCluster, prompt: Prompt) -> None:
    with Clients(pair) as clients:
        with pair.stopped("decode-0"):
            clients.start([prompt(60, 70 + n) for n in range(20)], MANY)
            pair.eventually(lambda: running(pair, "prefill-0", "held") == 20, "prefill does not hold them")
            clients.cancel()
            pair.assert_baseline("prefill-0", within_s=1.0)
        pair.assert_baseline("decode-0", within_s=2.0)


def test_three_hundred_at_once(pair: PlainCluster, prompt: Prompt) -> None:
    with Clients(pair) as clients:
        clients.start([prompt(80, 2000 + n) for n in range(300)], MANY)
        pair.eventually(lambda: running(pair, "decode-0", "running") >= 5, "decode does not get going")
        clients.cancel()
        pair.assert_baseline(within_s=2.0)


def test_fifty_clients_drop_their_connections_mid_stream(pair: PlainCluster, prompt: Prompt) -> None:
    """Each has a connection of its own, and has read some tokens."""
    started = threading.Barrier(51)

    def read_some(n: int) -> int:
        with Clients(pair) as client:
            client.start([prompt(40, 3000 + n)], MANY)
            got = sum(len(next(client.calls[0]).token_ids) for _ in range(3))
            started.wait(60)
            return got  # the channel closes without a word

    with ThreadPoolExecutor(50) as threads:
        futures = [threads.submit(read_some, n) for n in range(50)]
        started.wait(60)
        assert all(future.result(30) >= 3 for future in futures)
    pair.assert_baseline(within_s=2.0)


def test_an_answer_that_meets_a_cancel_is_not_kept(pair: PlainCluster, prompt: Prompt) -> None:
    """Straight at prefill, as a router does: cancelled around the answer, which may be lost on its way."""
    sampling = replace(MANY, seed=1)
    with grpc.insecure_channel(pair.servers["prefill-0"].facts["endpoint"]) as channel:
        stub = worker_pb2_grpc.PrefillStub(channel)
        started = time.monotonic()
        stub.Run(codec.request_to_wire(WorkerRequest("raw", tuple(prompt(60, 3999)), sampling)), timeout=30)
        whole_s = time.monotonic() - started
        stub.Abandon(worker_pb2.AbandonRequest(request_id="raw"), timeout=10)
        answered = 0
        for n in range(60):
            request = WorkerRequest(f"raw-{n}", tuple(prompt(60, 4000 + n)), sampling)
            call = stub.Run.future(codec.request_to_wire(request), timeout=30)
            time.sleep(whole_s * (n % 40) / 20)
            answered += not call.cancel()
            stub.Abandon(worker_pb2.AbandonRequest(request_id=f"raw-{n}"), timeout=10)
        pair.assert_baseline("prefill-0", within_s=1.0)
    assert 0 < answered < 60


def test_nobody_takes_the_answer(pair: PlainCluster, prompt: Prompt) -> None:
    """A router that died between prefill's end and decode's start: the lease gives the blocks back."""
    lease_s = float(pair.settings["transceiver.lease_s"])
    with grpc.insecure_channel(pair.servers["prefill-0"].facts["endpoint"]) as channel:
        stub = worker_pb2_grpc.PrefillStub(channel)
        for n in range(10):
            request = WorkerRequest(f"orphan-{n}", tuple(prompt(60, 5000 + n)), replace(MANY, seed=1))
            assert stub.Run(codec.request_to_wire(request), timeout=30).handle
    assert running(pair, "prefill-0", "held") > 0
    pair.assert_baseline(within_s=lease_s + 1.0)
