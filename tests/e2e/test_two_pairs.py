"""Two prefill and two decode workers: many streams, and workers killed under them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import KVFerryError, SamplingParams

STREAMS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
PATIENCE_S = 60.0
ANSWER_S = 240.0


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Any]) -> Iterator[Any]:
    return start_cluster("--prefill", "2", "--decode", "2", "--kv_cache.bytes", "256MiB")


@pytest.fixture(scope="module")
def prompts(long_ids: list[int]) -> list[list[int]]:
    """Different lengths, most of them different prefixes."""
    return [long_ids[31 * n : 31 * n + 5 + 3 * n] for n in range(STREAMS)]


@pytest.fixture(scope="module")
def model(reference: Any, smollm2_dir: Path) -> Any:
    return reference.load(smollm2_dir)


def test_many_streams_are_golden_and_spread_over_all_workers(
    cluster: Any, model: Any, assert_golden: Any, prompts: list[list[int]]
) -> None:
    results = cluster.complete_all(prompts)
    for prompt, completed in zip(prompts, results, strict=True):
        assert_golden(model, prompt, completed.token_ids)
    assert {completed.route["prefill"] for completed in results} == {"prefill-0", "prefill-1"}
    assert {completed.route["decode"] for completed in results} == {"decode-0", "decode-1"}
    cluster.settled()


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_killed_worker_costs_no_answer_and_comes_back(
    cluster: Any, model: Any, assert_golden: Any, prompts: list[list[int]], victim: str
) -> None:
    before = cluster.settled()[victim]
    some = prompts[16:24]
    decoding = [threading.Event() for _ in some]
    with ThreadPoolExecutor(len(some)) as threads:
        running = [
            threads.submit(cluster.complete, prompt, LONG, lambda count, event=event: count > 1 and event.set())
            for prompt, event in zip(some, decoding, strict=True)
        ]
        if victim.startswith("decode"):
            # The second token comes from decode, and 94 more are to come: the victim is in the middle of some.
            assert all(event.wait(PATIENCE_S) for event in decoding)
        else:
            _await_work_on(cluster, victim)
        os.kill(before["pid"], signal.SIGKILL)
        outcomes = [_outcome(future) for future in running]
    for prompt, outcome in zip(some, outcomes, strict=True):
        if isinstance(outcome, KVFerryError):
            assert outcome.code.name == "UNAVAILABLE"
        else:
            assert len(outcome.token_ids) == LONG.max_tokens
            assert_golden(model, prompt, outcome.token_ids)
    assert sum(not isinstance(outcome, KVFerryError) for outcome in outcomes) >= len(some) - 1

    if victim.startswith("decode"):
        # Those it was in the middle of were started again elsewhere, without sending a token twice.
        assert any(outcome.route["retries"] for outcome in outcomes if not isinstance(outcome, KVFerryError))

    def back(status: dict[str, Any]) -> bool:
        worker = status.get(victim, {})
        return worker.get("state") == "ready" and worker["incarnation"] != before["incarnation"]

    after = cluster.eventually(back, f"{victim} does not come back")[victim]
    assert after["pid"] != before["pid"]
    cluster.settled()
    results = cluster.complete_all(prompts[:8])
    assert victim in {worker for completed in results for worker in completed.route.values()}
    cluster.settled()


def _await_work_on(cluster: Any, name: str) -> None:
    """Until the worker has begun on something; the status is at most a second old."""
    deadline = time.monotonic() + 30
    ended = {"finished", "released", "failed", "cancelled", "held"}
    while time.monotonic() < deadline:
        requests = cluster.status()[name]["requests"]
        if any(count for state, count in requests.items() if state not in ended):
            return
        time.sleep(0.05)
    # A prefill may be done between two looks: killing it then still tests that it comes back.


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.result(timeout=ANSWER_S)
    except KVFerryError as error:
        return error
