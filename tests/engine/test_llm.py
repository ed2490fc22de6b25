"""One aggregated worker in process, on a tiny random Llama against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import ConfigError, FinishReason, InvalidRequestError, SamplingParams
from kvferry.engine import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
VERSIONS = ["V1", "V2"]


@pytest.fixture(scope="module", params=VERSIONS)
def llm(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_llama_dir, manager=request.param, kv_bytes=32 << 20, threads=1) as made:
        yield made


def prompts(vocab: int) -> list[list[int]]:
    return [[(7 * i + 3 * n) % vocab for i in range(n)] for n in (1, 15, 16, 17, 31, 32, 33, 64, 65, 129, 300)]


def test_the_pair_is_resolved_without_a_transceiver(llm: LLM) -> None:
    assert (llm.resolution.backend, llm.resolution.runtime) == ("NONE", None)
    assert llm.manager.version == llm.resolution.manager


def test_a_batch_is_golden_and_leaves_no_block_behind(
    llm: LLM, reference: Any, assert_golden: Any, tiny_llama_dir: Path
) -> None:
    model = reference.load(tiny_llama_dir)
    given = prompts(model.config.vocab_size)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
    for prompt, result in zip(given, results, strict=True):
        assert len(result.token_ids) == 24
        assert result.finish_reason is FinishReason.LENGTH
        assert_golden(model, prompt, result.token_ids)
    assert llm.manager.counts().free == llm.manager.counts().total


def test_a_second_time_finds_the_prompt_and_says_the_same(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [(11 * i) % 400 for i in range(100)]}
    [first] = llm.generate([prompt], GREEDY)
    [second] = llm.generate([prompt], GREEDY)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 96)
    assert first.token_ids == second.token_ids
    [salted] = llm.generate([{**prompt, "cache_salt": "other"}], GREEDY)
    assert salted.usage.cached_tokens == 0
    assert salted.token_ids == first.token_ids


def test_seeds_are_independent_of_the_batch(llm: LLM) -> None:
    sampling = SamplingParams(seed=7, max_tokens=16, ignore_eos=True)
    [alone] = llm.generate(["Once upon a time"], sampling)
    crowd = llm.generate(["A router sends", "Once upon a time", "The quick brown fox"], sampling)
    assert crowd[1].token_ids == alone.token_ids
    [other] = llm.generate(["Once upon a time"], SamplingParams(seed=8, max_tokens=16, ignore_eos=True))
    assert other.token_ids != alone.token_ids


def test_logprobs_are_the_references(llm: LLM, reference: Any, tiny_llama_dir: Path) -> None:
    prompt = list(range(20))
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    [result] = llm.generate([{"prompt_token_ids": prompt}], sampling)
    logits = reference.logits(reference.load(tiny_llama_dir), [*prompt, *result.token_ids])[19:-1].log_softmax(-1)
    assert len(result.logprobs) == 5
    for row, logprob in zip(logits, result.logprobs, strict=True):
        assert logprob.logprob == pytest.approx(float(row[logprob.token_id]), abs=1e-4)
        assert [token for token, _ in logprob.top] == row.topk(2).indices.tolist()


def test_text_is_what_its_tokens_decode_to(llm: LLM) -> None:
    [result] = llm.generate(["Grüße aus Köln"], GREEDY)
    assert result.text == llm.tokenizer.decode(result.token_ids)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    [whole] = llm.generate(["The quick"], GREEDY)
    stop = whole.text[6:9]
    cut = whole.text.index(stop)
    [stopped] = llm.generate(
        ["The quick"], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,))
    )
    assert stopped.text == whole.text[:cut]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.token_ids) < 24


def test_one_sampling_per_prompt(llm: LLM) -> None:
    choices = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(result.token_ids) for result in llm.generate(["a", "b"], choices)] == [1, 5]
    with pytest.raises(InvalidRequestError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], choices[:1])


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [10**6]}, "prompt"),
        ({"prompt_token_ids": [1] * 2048}, "prompt"),
        ({"ids": [1]}, "prompt"),
    ],
)
def test_bad_prompts_name_the_field(llm: LLM, prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([prompt], GREEDY)
    assert caught.value.field == field
    assert len(llm.generate(["still works"], GREEDY)[0].token_ids) == 24


def test_a_pool_too_small_for_the_batch_still_finishes(
    tiny_llama_dir: Path, assert_golden: Any, reference: Any
) -> None:
    block = 3 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, dim, fp32
    model = reference.load(tiny_llama_dir)
    given = [[(5 * i + n) % 400 for i in range(30)] for n in range(6)]
    with LLM(tiny_llama_dir, kv_bytes=10 * block, threads=1) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
        for prompt, result in zip(given, results, strict=True):
            assert_golden(model, prompt, result.token_ids)
        assert llm.manager.counts().free == llm.manager.counts().total == 10


def test_settings_are_named(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="unknown precision 'fp7'"):
        LLM(tiny_llama_dir, precision="fp7")
    with pytest.raises(ConfigError, match=r"max_context_tokens"):
        LLM(tiny_llama_dir, max_context_tokens=10**6)
