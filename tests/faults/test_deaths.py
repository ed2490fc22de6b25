"""Workers and routers that are killed, stopped and started again under load."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from plain_cluster import GREEDY, LIVE, PlainCluster

from kvferry.cli.client import Completed, token_request
from kvferry.core import KVFerryError
from kvferry.proto import generation_pb2_grpc

LEASE_S = 2.0
LOST_AFTER_S = 2.5
GRACE_S = 2.0
LONG = replace(GREEDY, max_tokens=150)

Prompt = Callable[[int, int], list[int]]


@pytest.fixture(scope="module", params=["prefill_first", "decode_first"])
def four(request: pytest.FixtureRequest, start_plain: Any) -> Iterator[PlainCluster]:
    """Two prefill and two decode workers, under either schedule. A prompt of 300 tokens takes several steps."""
    settings = {"transceiver.lease_s": LEASE_S, "router.worker_wait_s": 5, "router.schedule": request.param}
    cluster = start_plain(2, 2, 256, **settings)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def as_before(four: PlainCluster, golden: Any, prompt: Prompt) -> Iterator[None]:
    """After each test: all four workers are there, with all their blocks, and all of them serve."""
    yield
    for name, server in four.servers.items():
        if not server.alive:
            revive(four, name)
    four.await_workers([name for name in four.servers if name != "router"])
    four.assert_baseline(within_s=LEASE_S + GRACE_S)
    seed = time.monotonic_ns()
    prompts = [prompt(40, seed + n) for n in range(12)]
    probes = four.complete_all(prompts)
    for ids, probe in zip(prompts, probes, strict=True):
        golden(ids, probe)
    assert {probe.route["prefill"] for probe in probes} == {"prefill-0", "prefill-1"}
    assert {probe.route["decode"] for probe in probes} == {"decode-0", "decode-1"}
    four.assert_baseline(within_s=1.5)


def revive(four: PlainCluster, name: str) -> None:
    """A new process under the same name and at the same address."""
    if name == "router":
        four.spawn_router()
    else:
        port = int(four.servers[name].facts["endpoint"].rpartition(":")[2])
        four.spawn_worker(name, port)


def kill(four: PlainCluster, name: str) -> None:
    four.signal(name, signal.SIGKILL)
    four.servers[name].wait()


def outcome(future: Future[Completed]) -> Completed | KVFerryError:
    try:
        return future.result(60)
    except KVFerryError as error:
        return error


def state_of(four: PlainCluster, name: str) -> str:
    return next(worker.state for worker in four.router_status().workers if worker.name == name)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_killed_under_load(four: PlainCluster, golden: Any, prompt: Prompt, victim: str) -> None:
    """Others take over without sending a token twice; the rest of the cluster stays healthy throughout."""
    prompts = [prompt(300, 10 + n) for n in range(24)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        running = [threads.submit(four.complete, ids, LONG) for ids in prompts]
        busy = ("running", "prefilling", "loading")
        four.eventually(lambda: any(four.describe(victim).requests.get(state) for state in busy), "nothing runs there")
        kill(four, victim)
        killed = time.monotonic()
        four.eventually(lambda: state_of(four, victim) == "lost", "it is not missed", within_s=LOST_AFTER_S)
        after = four.complete(prompt(40, 50))
        assert victim not in after.route.values()
        outcomes = [outcome(future) for future in running]
    assert time.monotonic() - killed < 30
    for name in four.workers():
        assert four.describe(name).state == "ready"
    for ids, done in zip(prompts, outcomes, strict=True):
        assert isinstance(done, Completed), done
        assert len(done.token_ids) == LONG.max_tokens
        golden(ids, done)


def test_prefill_restarts_on_its_port(four: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """Decode made contact with its former life. From the first request on, it reads from the new one."""
    before = four.servers["prefill-0"].facts
    kill(four, "prefill-0")
    revive(four, "prefill-0")
    four.await_workers(["prefill-0", "prefill-1", "decode-0", "decode-1"])
    after = four.servers["prefill-0"].facts
    assert after["endpoint"] == before["endpoint"]
    assert after["incarnation"] != before["incarnation"]
    prompts = [prompt(60, 100 + n) for n in range(12)]
    answers = four.complete_all(prompts)
    for ids, done in zip(prompts, answers, strict=True):
        golden(ids, done)
        assert done.route["transferred_bytes"] > 0
        assert done.route["retries"] == 0
    assert "prefill-0" in {done.route["prefill"] for done in answers}


def test_the_router_dies_and_comes_back_at_its_address(four: PlainCluster, prompt: Prompt) -> None:
    """In the middle of many requests: every block of theirs is back within a lease, and the workers join again."""
    channel = grpc.insecure_channel(four.grpc)
    stub = generation_pb2_grpc.GenerationStub(channel)
    calls = [stub.GenerateStream(token_request(prompt(200, 200 + n), LONG), timeout=60) for n in range(30)]
    next(calls[0])
    kill(four, "router")
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    channel.close()
    four.assert_baseline(within_s=LEASE_S + GRACE_S)
    pids = {name: four.servers[name].pid for name in four.workers()}
    revive(four, "router")
    four.await_workers(list(pids))
    assert {name: four.servers[name].pid for name in four.workers()} == pids


def test_a_stopped_prefill_costs_decode_nothing(four: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """Both prefill workers stand still, and twice the pool's worth of requests is aborted: decode is at baseline
    within lease and grace, before prefill has said another word. Pages that prefill was writing to are in quarantine
    until it does, since it may go on."""
    pushed = four.settings["router.schedule"] == "decode_first"
    channel = grpc.insecure_channel(four.grpc)
    stub = generation_pb2_grpc.GenerationStub(channel)
    ids = [prompt(16 * 16, 300 + n) for n in range(2 * 2 * 256 // 17)]
    calls = [stub.GenerateStream(token_request(one, LONG), timeout=60) for one in ids]
    next(calls[0])
    with four.stopped("prefill-0"), four.stopped("prefill-1"):
        for call in calls:
            call.cancel()
        if pushed:
            rest = lambda: all(at_rest_but_for_quarantine(four, name) for name in ("decode-0", "decode-1"))  # noqa: E731
            four.eventually(rest, "decode holds more than what may still be written", LEASE_S + GRACE_S)
        else:
            four.assert_baseline("decode-0", "decode-1", within_s=LEASE_S + GRACE_S)
            assert {four.describe(name).state for name in ("decode-0", "decode-1")} == {"ready"}
    four.assert_baseline("decode-0", "decode-1")
    channel.close()


def at_rest_but_for_quarantine(cluster: PlainCluster, name: str) -> bool:
    status = cluster.describe(name)
    blocks = status.blocks
    settled = blocks.free + blocks.quarantined == blocks.total > 0 == blocks.pinned
    return settled and not any(status.requests.get(state, 0) for state in LIVE)


def test_a_stopped_decode_is_replaced_and_taken_back(four: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """Its requests move to the other one once it is missed; it comes back as the same incarnation."""
    prompts = [prompt(100, 400 + n) for n in range(16)]
    incarnation = four.servers["decode-0"].facts["incarnation"]
    with ThreadPoolExecutor(len(prompts)) as threads:
        running = [threads.submit(four.complete, one, LONG) for one in prompts]
        four.eventually(lambda: bool(four.describe("decode-0").requests.get("running")), "nothing runs there")
        with four.stopped("decode-0"):
            outcomes = [outcome(future) for future in running]
    for one, done in zip(prompts, outcomes, strict=True):
        assert isinstance(done, Completed), done
        assert len(done.token_ids) == LONG.max_tokens
        golden(one, done)
    four.eventually(lambda: state_of(four, "decode-0") == "ready", "it is not taken back")
    assert four.describe("decode-0").incarnation == incarnation
