"""Decode first, pulling: prompts handed off in parts, some of which are slow, lost, or wanted by nobody any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from plain_cluster import GREEDY, PlainCluster
from shaky_pair import IN_PARTS, LEASE_S, TIMEOUT_S, start_shaky

from kvferry.cli.client import token_request

BLOCKS = 64
BLOCK = 16
PROMPT_BLOCKS = 40
TOKEN_NBYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, fp32

Prompt = Callable[[int, int], list[int]]


@pytest.fixture(scope="module")
def shaky(start_plain: Any) -> Iterator[PlainCluster]:
    """Both workers' agents misbehave on command; a prompt of 40 blocks is computed in ten steps at least."""
    cluster = start_shaky(start_plain, BLOCKS, **IN_PARTS, **{"router.flow": "pull"})
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def as_before(shaky: PlainCluster) -> Iterator[None]:
    yield
    shaky.servers["decode-0"].tell("calm")
    shaky.assert_baseline(within_s=TIMEOUT_S + LEASE_S + 2)


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
    shaky.inject("decode-0", "late", skip=skip, delay_s=1.0)
    completed = shaky.complete(ids)
    golden(ids, completed)
    assert completed.route["transferred_bytes"] == len(ids) * TOKEN_NBYTES


@pytest.mark.parametrize("skip", [0, 3])
def test_after_a_lost_part_the_prompt_is_computed_by_decode(
    shaky: PlainCluster, golden: Any, prompt: Prompt, skip: int
) -> None:
    ids = prompt(PROMPT_BLOCKS * BLOCK, 20 + skip)
    shaky.inject("decode-0", "black_hole", skip=skip)
    completed = shaky.complete(ids)
    golden(ids, completed)
    assert completed.route["transferred_bytes"] == 0
    assert completed.timings["total_ms"] >= 1000 * TIMEOUT_S


def test_a_part_that_nobody_wants_any_more_spoils_nobody(shaky: PlainCluster, golden: Any, prompt: Prompt) -> None:
    """A's first part lands long after A has gone, in pages that B would get: B waits for them, and is right."""
    a, b = prompt(PROMPT_BLOCKS * BLOCK, 30), prompt(PROMPT_BLOCKS * BLOCK, 31)
    shaky.inject("decode-0", "late", delay_s=2.0)
    with shaky.client() as client:
        stream = client.stream(token_request(a, GREEDY))
        next(stream)
        stream.close()
    taken = shaky.describe("decode-0").blocks
    assert taken.free == BLOCKS - PROMPT_BLOCKS  # a page that is still to be written is not free
    shaky.assert_baseline("prefill-0", within_s=1.0)
    completed = shaky.complete(b)
    golden(b, completed)
    golden(a, shaky.complete(a))


def test_a_stopped_prefill_holds_nothing_for_ever(shaky: PlainCluster, prompt: Prompt) -> None:
    """Decode has reserved for a prompt whose computing stands still; its client gives up."""
    with shaky.client() as client:
        stream = client.stream(token_request(prompt(PROMPT_BLOCKS * BLOCK, 40), GREEDY))
        with shaky.stopped("prefill-0"):
            time.sleep(0.1)
            stream.close()
            shaky.assert_baseline("decode-0", within_s=TIMEOUT_S + 1)
    shaky.eventually(lambda: len(shaky.router_status().workers) == 2, "the workers do not come back")
