"""What a disaggregated pair answers is what one worker would have answered: lengths, hits, stop rules, seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from plain_cluster import GREEDY, PlainCluster

from kvferry.cli.client import Completed, GenerationClient, token_request
from kvferry.core import ErrorCode, FinishReason, KVFerryError, SamplingParams

BLOCK = 16
TOKEN_NBYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, fp32
EOS = 2
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK, 5 * BLOCK + 1]


@pytest.fixture(scope="module", params=["V2", "V1"])
def cluster(request: Any, start_plain: Any) -> Iterator[PlainCluster]:
    if request.param == "V2":
        yield request.getfixturevalue("pair")
        return
    cluster = start_plain(1, 1, 256, **{"kv_cache.manager": request.param})
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def nothing_left(cluster: PlainCluster) -> Iterator[None]:
    yield
    cluster.assert_baseline()


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_a_block_without_and_with_a_hit(
    cluster: PlainCluster, golden: Any, prompt: Any, length: int
) -> None:
    """The second time decode has all whole blocks and one token is left; the third, only a part of the prompt."""
    ids = prompt(length, length)
    cold, full = cluster.complete(ids), cluster.complete(ids)
    longer = ids[: length // 2] + prompt(length - length // 2 + 3, 1000 + length)
    part = cluster.complete(longer)
    for asked, completed in ((ids, cold), (ids, full), (longer, part)):
        golden(asked, completed)
        assert completed.route["disaggregated"]
    assert cold.route["transferred_bytes"] == length * TOKEN_NBYTES
    whole_blocks = length // BLOCK * BLOCK
    assert full.route["transferred_bytes"] == (length - whole_blocks) * TOKEN_NBYTES
    assert part.route["transferred_bytes"] == (len(longer) - length // 2 // BLOCK * BLOCK) * TOKEN_NBYTES


def test_a_full_hit_moves_nothing_and_tells_prefill(cluster: PlainCluster, golden: Any, prompt: Any) -> None:
    ids = prompt(4 * BLOCK, 7)
    released = cluster.describe("prefill-0").requests["released"]
    golden(ids, cluster.complete(ids))
    again = cluster.complete(ids)
    golden(ids, again)
    assert (again.route["disaggregated"], again.route["transferred_bytes"]) == (True, 0)
    cluster.assert_baseline("prefill-0", within_s=1.0)  # told, not found out by the lease
    assert cluster.describe("prefill-0").requests["released"] == released + 2


def test_one_token_is_one_token_and_moves_nothing(cluster: PlainCluster, golden: Any, prompt: Any) -> None:
    ids = prompt(40, 8)
    before = cluster.describe("decode-0").requests.get("finished", 0)
    completed = cluster.complete(ids, replace(GREEDY, max_tokens=1))
    golden(ids, completed)
    assert (len(completed.token_ids), completed.finish_reason) == (1, FinishReason.LENGTH)
    _assert_ended_in_prefill(cluster, completed, before)


def test_a_first_token_that_ends_the_text_ends_the_request(cluster: PlainCluster, prompt: Any) -> None:
    before = cluster.describe("decode-0").requests.get("finished", 0)
    eos_first = SamplingParams(temperature=0, max_tokens=9, logit_bias={EOS: 100.0})
    completed = cluster.complete(prompt(40, 9), eos_first)
    assert (completed.token_ids, completed.finish_reason) == ([EOS], FinishReason.STOP)
    _assert_ended_in_prefill(cluster, completed, before)


def test_a_stop_id_on_the_first_token_stops(cluster: PlainCluster, prompt: Any) -> None:
    before = cluster.describe("decode-0").requests.get("finished", 0)
    ids = prompt(40, 10)
    first = cluster.complete(ids, replace(GREEDY, max_tokens=1)).token_ids[0]
    completed = cluster.complete(ids, replace(GREEDY, stop_token_ids=(first,)))
    assert (completed.token_ids, completed.finish_reason) == ([first], FinishReason.STOP)
    _assert_ended_in_prefill(cluster, completed, before)


def test_min_tokens_holds_a_favoured_end_back(cluster: PlainCluster, aggregated: Any, prompt: Any) -> None:
    """The end would come at once, on prefill; it comes after five tokens, on decode."""
    ids = prompt(40, 11)
    sampling = SamplingParams(temperature=0, max_tokens=9, min_tokens=5, logit_bias={EOS: 100.0})
    completed = cluster.complete(ids, sampling)
    assert EOS not in completed.token_ids[:5]
    assert (completed.token_ids[5:], completed.finish_reason) == ([EOS], FinishReason.STOP)
    (alone,) = aggregated.generate([{"prompt_token_ids": ids}], sampling)
    assert completed.token_ids == alone.token_ids


def test_logprobs_are_as_many_as_tokens_and_those_of_one_worker(
    cluster: PlainCluster, aggregated: Any, prompt: Any
) -> None:
    ids = prompt(40, 12)
    sampling = replace(GREEDY, logprobs=3)
    completed = cluster.complete(ids, sampling)
    (alone,) = aggregated.generate([{"prompt_token_ids": ids}], sampling)
    assert [entry["token_id"] for entry in completed.logprobs] == completed.token_ids == alone.token_ids
    for ours, theirs in zip(completed.logprobs, alone.logprobs, strict=True):
        assert ours["logprob"] == pytest.approx(theirs.logprob, abs=1e-4)
        assert len(ours["top"]) == 3


def test_a_seed_gives_the_same_text_on_any_workers(cluster: PlainCluster, aggregated: Any, prompt: Any) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    prompts = [prompt(20 + 3 * n, 100 + n) for n in range(10)]
    alone = [done.token_ids for done in aggregated.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    for _ in range(2):  # the second round finds its prompts cached on both sides
        assert [done.token_ids for done in cluster.complete_all(prompts, sampling)] == alone
    other = cluster.complete(prompts[0], replace(sampling, seed=8))
    assert other.token_ids != alone[0]


def test_two_live_requests_may_carry_one_id(cluster: PlainCluster, golden: Any, prompt: Any) -> None:
    prompts = [prompt(50, 20), prompt(70, 21)]
    with GenerationClient(cluster.grpc, 30) as client:
        streams = []
        for ids in prompts:
            wire = token_request(ids, replace(GREEDY, max_tokens=40))
            wire.request_id = "mine"
            streams.append(client.stream(wire))
        answers = [Completed(), Completed()]
        for messages in zip(*streams, strict=False):
            for answer, message in zip(answers, messages, strict=True):
                answer.add(message)
        for answer, stream in zip(answers, streams, strict=True):
            for message in stream:
                answer.add(message)
    for ids, answer in zip(prompts, answers, strict=True):
        assert (answer.request_id, len(answer.token_ids)) == ("mine", 40)
        golden(ids, answer)


@pytest.mark.parametrize("length", [2048, 2049, 5000, 200_000])
def test_a_prompt_over_the_limit_is_refused_by_name(cluster: PlainCluster, prompt: Any, length: int) -> None:
    with pytest.raises(KVFerryError, match="2048") as caught:
        cluster.complete(prompt(length, 30))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "prompt")


def test_usage_counts_the_prompt_prefill_found_cached(cluster: PlainCluster, prompt: Any) -> None:
    ids = prompt(3 * BLOCK + 5, 31)
    usages = [cluster.complete(ids).usage for _ in range(2)]
    assert [usage["cached_tokens"] for usage in usages] == [0, 3 * BLOCK]
    assert all((usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 12) for usage in usages)


def _assert_ended_in_prefill(cluster: PlainCluster, completed: Completed, finished_before: int) -> None:
    assert (completed.route["decode"], completed.route["disaggregated"]) == (None, False)
    assert completed.route["transferred_bytes"] == 0
    assert cluster.describe("decode-0").requests.get("finished", 0) == finished_before
