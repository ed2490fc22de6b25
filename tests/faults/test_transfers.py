"""Transfers that are slow, lost, cut or in doubt: every answer is golden, no block is lost, none is used early."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from plain_cluster import GREEDY, PlainCluster
from shaky_pair import LEASE_S, TIMEOUT_S, start_shaky

from kvferry.cli.client import Completed, token_request
from kvferry.core import ErrorCode, KVFerryError

BLOCKS = 48
BLOCK = 16

Prompt = Callable[[int, int], list[int]]


@pytest.fixture(scope="module")
def shaky(start_plain: Any) -> Iterator[PlainCluster]:
    """Both workers' agents and forward passes misbehave on command; pools of 768 tokens."""
    cluster = start_shaky(start_plain, BLOCKS)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def as_before(shaky: PlainCluster, golden: Any, prompt: Prompt) -> Iterator[None]:
    """After each test every block is free again, and transfers work, at the latest when a first contact that was
    lost too has been given up."""
    yield
    shaky.servers["decode-0"].tell("calm")
    shaky.assert_baseline(within_s=TIMEOUT_S + LEASE_S + 2)

    def transfers() -> bool:
        ids = prompt(33, time.monotonic_ns())
        probe = shaky.complete(ids)
        golden(ids, probe)
        return bool(probe.route["transferred_bytes"] > 0)

    shaky.eventually(transfers, "transfers do not work again", within_s=10)


def health(cluster: PlainCluster) -> int:
    try:
        with urllib.request.urlopen(f"http://{cluster.http}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def abort_when_loading(cluster: PlainCluster, ids: list[int]) -> None:
    """Starts a request and leaves it while its blocks are on their way."""
    with cluster.client() as client:
        stream = client.stream(token_request(ids, GREEDY))
        next(stream)
        loading = lambda: cluster.describe("decode-0").requests.get("loading", 0) > 0  # noqa: E731
        cluster.eventually(loading, "no load begins")
        stream.close()


def test_an_aborted_slow_transfer_spoils_nobody(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """A's bytes land long after A has gone, in pages that B needs: B waits for them, and is right."""
    a, b = prompt(36 * BLOCK, 1), prompt(30 * BLOCK, 2)
    shaky.inject("decode-0", "late", delay_s=2.0)
    abort_when_loading(shaky, a)
    taken = shaky.describe("decode-0").blocks
    assert taken.free == BLOCKS - 37  # a page that is still to be written is not free
    completed = shaky.complete(b)
    golden(b, completed)
    assert completed.route["transferred_bytes"] > 0
    golden(a, shaky.complete(a))


def test_a_source_page_reused_under_a_slow_read_is_noticed(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """The lease ends while A is on its way, prefill computes others in A's pages: A is not decoded from those."""
    a = prompt(36 * BLOCK, 3)
    with ThreadPoolExecutor(1) as threads:
        shaky.inject("decode-0", "late", delay_s=2.0)
        running = threads.submit(shaky.complete, a)
        shaky.eventually(lambda: shaky.describe("decode-0").requests.get("loading", 0) > 0, "no load begins")
        handle_gone = shaky.describe("prefill-0").requests.get("held", 0)
        assert handle_gone == 1
        others = [prompt(20 * BLOCK, 4), prompt(20 * BLOCK, 5)]
        for ids in others:
            golden(ids, shaky.complete(ids))
        golden(a, running.result(30))


def test_one_black_hole_times_out_and_the_others_go_on(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    lost = prompt(60, 6)
    with ThreadPoolExecutor(1) as threads:
        shaky.inject("decode-0", "black_hole")
        running = threads.submit(shaky.complete, lost)
        shaky.eventually(lambda: shaky.describe("decode-0").requests.get("loading", 0) > 0, "no load begins")
        for n in range(5):
            ids = prompt(60, 10 + n)
            completed = shaky.complete(ids)
            golden(ids, completed)
            assert completed.timings["total_ms"] < 1000 * TIMEOUT_S
        assert not running.done()
        completed = running.result(30)
    golden(lost, completed)
    assert completed.route["transferred_bytes"] == 0  # decode computed the prompt itself


def test_fifty_timeouts_in_a_burst(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """More than the pool holds at once. Every answer is right, the worker lives, and nothing stays in quarantine."""
    prompts = [prompt(20, 100 + n) for n in range(50)]
    pid = shaky.describe("decode-0").pid
    shaky.inject("decode-0", "black_hole", count=20)
    for ids, completed in zip(prompts, shaky.complete_all(prompts), strict=True):
        golden(ids, completed)
    status = shaky.describe("decode-0")
    assert (status.pid, status.state) == (pid, "ready")


def test_blocks_in_doubt_are_never_reused_and_the_worker_says_so(
    shaky: PlainCluster, golden: Any, prompt: Prompt
) -> None:
    """The path cannot be cut for a while, so its pages stay in quarantine, past the budget: unhealthy, until it can."""
    ids = prompt(20 * BLOCK, 200)
    shaky.servers["decode-0"].tell("fail_fences", count=1000)
    shaky.inject("decode-0", "black_hole")
    completed = shaky.complete(ids)
    golden(ids, completed)  # computed elsewhere than in its pages
    status = shaky.describe("decode-0")
    assert status.blocks.quarantined == 21
    assert (status.state, "transceiver.max_quarantined" in status.state_reason) == ("unhealthy", True)
    shaky.eventually(lambda: health(shaky) == 503, "the cluster's health hides it", within_s=3)
    with pytest.raises(KVFerryError, match="quarantine") as caught:
        shaky.complete(prompt(20, 201), replace(GREEDY, max_tokens=4))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    time.sleep(LEASE_S)  # time alone frees nothing
    assert shaky.describe("decode-0").blocks.quarantined == 21
    shaky.servers["decode-0"].tell("calm")
    shaky.eventually(lambda: shaky.describe("decode-0").state == "ready", "decode does not recover", within_s=3)
    shaky.eventually(lambda: health(shaky) == 200, "the cluster does not recover", within_s=3)


@pytest.mark.parametrize("skip", [0, 1], ids=["data", "generations"])
def test_a_failed_read_is_computed_by_decode(shaky: PlainCluster, golden: Any, prompt: Prompt, skip: int) -> None:
    ids = prompt(60, 300 + skip)
    shaky.inject("decode-0", "drop", skip=skip)
    completed = shaky.complete(ids)
    golden(ids, completed)
    assert completed.route["transferred_bytes"] == 0


def test_a_source_that_reports_other_generations_is_not_believed(
    shaky: PlainCluster, golden: Any, prompt: Prompt
) -> None:
    ids = prompt(60, 310)
    shaky.inject("decode-0", "corrupt", skip=1)
    completed = shaky.complete(ids)
    golden(ids, completed)
    assert completed.route["transferred_bytes"] == 0


@pytest.mark.parametrize("skip", [0, 1], ids=["begin", "done"])
@pytest.mark.parametrize("fault", ["drop", "corrupt", "duplicate", "delay"])
def test_notifications_that_go_wrong_cost_at_most_a_lease(
    shaky: PlainCluster, golden: Any, prompt: Prompt, fault: str, skip: int
) -> None:
    ids = prompt(60, sum(map(ord, fault)) + skip)
    shaky.inject("decode-0", fault, "notification", skip=skip, delay_s=0.3)
    completed = shaky.complete(ids)
    golden(ids, completed)
    assert completed.route["transferred_bytes"] > 0
    shaky.assert_baseline("decode-0", within_s=1.0)
    shaky.assert_baseline("prefill-0", within_s=LEASE_S + 1.0)


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_bug_in_a_worker_is_answered_at_once_and_without_its_trace(
    shaky: PlainCluster, prompt: Prompt, worker: str
) -> None:
    shaky.servers[worker].tell("break_steps", count=1)
    started = time.monotonic()
    with pytest.raises(KVFerryError) as caught:
        shaky.complete(prompt(60, 400))
    assert time.monotonic() - started < 1.0
    assert caught.value.code is ErrorCode.INTERNAL
    assert "Traceback" not in caught.value.message
    assert "on command" not in caught.value.message


def test_prefill_with_no_room_is_swept_without_new_work(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """Hand-offs fill prefill's pool and decode loses every word about them: only their leases can make room."""
    with ThreadPoolExecutor(3) as threads:
        shaky.inject("decode-0", "drop", "notification", count=1000)
        prompts = [prompt(22 * BLOCK, 500 + n) for n in range(3)]
        started = time.monotonic()
        done: list[Completed] = list(threads.map(shaky.complete, prompts))
        waited_s = time.monotonic() - started
    for ids, completed in zip(prompts, done, strict=True):
        golden(ids, completed)
    assert LEASE_S * 0.9 < waited_s < LEASE_S + 3.0
