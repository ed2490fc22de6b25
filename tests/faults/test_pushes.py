"""Decode first, pushing: parts that are slow, lost, or written for nobody any more, and writers that stop or die."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from plain_cluster import GREEDY, PlainCluster
from shaky_pair import IN_PARTS, LEASE_S, TIMEOUT_S, start_shaky

from kvferry.cli.client import token_request
from kvferry.core import UnavailableError

BLOCKS = 64
BLOCK = 16
PROMPT_BLOCKS = 40
LATE_PARTS = 8
"""How many operations come before the last parts: ten parts, and first contact where there was none."""
TOKEN_NBYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, fp32

Prompt = Callable[[int, int], list[int]]


@pytest.fixture(scope="module")
def shaky(start_plain: Any) -> Iterator[PlainCluster]:
    """Both workers' agents misbehave on command; a prompt of 40 blocks is computed in ten steps at least."""
    cluster = start_shaky(start_plain, BLOCKS, **IN_PARTS)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def as_before(shaky: PlainCluster, golden: Any, prompt: Prompt) -> Iterator[None]:
    """After each test every block is free, and transfers work, at the latest when a first contact that was lost too
    has been given up."""
    yield
    if not shaky.servers["prefill-0"].alive:
        shaky.spawn_worker("prefill-0")
        shaky.await_workers(["prefill-0", "decode-0"])
    for name in ("prefill-0", "decode-0"):
        shaky.servers[name].tell("calm")
    shaky.assert_baseline(within_s=TIMEOUT_S + LEASE_S + 4)

    def transfers() -> bool:
        ids = prompt(33, time.monotonic_ns())
        try:
            probe = shaky.complete(ids)
        except UnavailableError:
            return False
        golden(ids, probe)
        return bool(probe.route["transferred_bytes"] > 0)

    shaky.eventually(transfers, "transfers do not work again", within_s=20)


def leave_after_the_first_token(cluster: PlainCluster, ids: list[int]) -> None:
    """All has been computed then, and not all has been written."""
    with cluster.client() as client:
        stream = client.stream(token_request(ids, GREEDY))
        next(stream)
        stream.close()


def test_all_of_a_prompt_moves_once(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    for length in (1, BLOCK, 63, 64, 65, PROMPT_BLOCKS * BLOCK, PROMPT_BLOCKS * BLOCK + 5):
        ids = prompt(length, 1000 + length)
        completed = shaky.complete(ids)
        golden(ids, completed)
        assert completed.route["transferred_bytes"] == length * TOKEN_NBYTES
        again = shaky.complete(ids)
        golden(ids, again)
        assert again.route["transferred_bytes"] == length % BLOCK * TOKEN_NBYTES


@pytest.mark.parametrize("skip", [0, 3])
def test_a_slow_part_is_waited_for(shaky: PlainCluster, golden: Any, prompt: Prompt, skip: int) -> None:
    ids = prompt(PROMPT_BLOCKS * BLOCK, 10 + skip)
    shaky.inject("prefill-0", "late", skip=skip, delay_s=1.0)
    completed = shaky.complete(ids)
    golden(ids, completed)
    assert completed.route["transferred_bytes"] == len(ids) * TOKEN_NBYTES
    assert completed.timings["total_ms"] >= 1000


@pytest.mark.parametrize("fault", ["black_hole", "drop"])
@pytest.mark.parametrize("skip", [0, 3])
def test_after_a_lost_part_the_prompt_is_computed_by_decode(
    shaky: PlainCluster, golden: Any, prompt: Prompt, fault: str, skip: int
) -> None:
    ids = prompt(PROMPT_BLOCKS * BLOCK, 20 + skip + 100 * len(fault))
    shaky.inject("prefill-0", fault, skip=skip)
    completed = shaky.complete(ids)
    golden(ids, completed)
    # Where first contact was lost before, its own first read is what fails: then all of it is pulled.
    nothing, all_of_it = 0, len(ids) * TOKEN_NBYTES
    assert completed.route["transferred_bytes"] in ((nothing,) if skip else (nothing, all_of_it))
    assert completed.timings["total_ms"] < 1000 * TIMEOUT_S or fault == "black_hole"


@pytest.mark.parametrize("fault", ["drop", "duplicate", "corrupt", "delay"])
def test_a_last_word_that_goes_wrong_costs_a_second(
    shaky: PlainCluster, golden: Any, prompt: Prompt, fault: str
) -> None:
    ids = prompt(PROMPT_BLOCKS * BLOCK, 200 + len(fault))
    shaky.inject("prefill-0", fault, "notification", delay_s=0.3)
    completed = shaky.complete(ids)
    golden(ids, completed)
    assert completed.route["transferred_bytes"] == len(ids) * TOKEN_NBYTES
    shaky.assert_baseline(within_s=1.0)


def test_a_part_that_nobody_wants_any_more_spoils_nobody(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """A's part lands after A has gone, in pages that B would get: B waits for them, and is right."""
    a, b = prompt(PROMPT_BLOCKS * BLOCK, 30), prompt(PROMPT_BLOCKS * BLOCK, 31)
    shaky.inject("prefill-0", "late", skip=LATE_PARTS, count=2, delay_s=2.0)
    leave_after_the_first_token(shaky, a)
    assert shaky.describe("decode-0").blocks.free == BLOCKS - PROMPT_BLOCKS
    completed = shaky.complete(b)
    golden(b, completed)
    golden(a, shaky.complete(a))


def test_pages_of_a_stopped_writer_are_free_when_it_has_said_so(shaky: PlainCluster, prompt: Prompt) -> None:
    """Time alone frees nothing: it may write as soon as it goes on."""
    shaky.inject("prefill-0", "late", skip=LATE_PARTS, count=2, delay_s=2.0)
    with shaky.client() as client:
        stream = client.stream(token_request(prompt(PROMPT_BLOCKS * BLOCK, 40), GREEDY))
        next(stream)
        with shaky.stopped("prefill-0"):
            stream.close()
            in_doubt = lambda: shaky.describe("decode-0").blocks.quarantined == PROMPT_BLOCKS  # noqa: E731
            shaky.eventually(in_doubt, "the pages are not in quarantine", within_s=2 * TIMEOUT_S)
            assert shaky.describe("decode-0").state == "unhealthy"  # 40 of 64 blocks are more than a quarter
            time.sleep(TIMEOUT_S + LEASE_S)
            assert in_doubt()
    shaky.eventually(lambda: len(shaky.router_status().workers) == 2, "the workers do not come back")
    shaky.assert_baseline("decode-0", within_s=5.0)
    assert shaky.describe("decode-0").state == "ready"


def test_pages_of_a_killed_writer_are_free_when_it_is_known_dead(
    shaky: PlainCluster, golden: Any, prompt: Prompt
) -> None:
    ids = prompt(PROMPT_BLOCKS * BLOCK, 50)
    with ThreadPoolExecutor(1) as threads:
        shaky.inject("prefill-0", "late", skip=1, delay_s=2.0)
        running = threads.submit(shaky.complete, ids)
        shaky.eventually(lambda: shaky.describe("decode-0").requests.get("loading", 0) > 0, "no load begins")
        time.sleep(0.5)
        shaky.signal("prefill-0", signal.SIGKILL)
        shaky.servers["prefill-0"].wait()
        golden(ids, running.result(30))  # by decode itself
    shaky.assert_baseline("decode-0", within_s=5.0)
