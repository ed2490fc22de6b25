"""Beam search on manager V1 against transformers' own, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_beams import transformers_beams

from kvferry.core import ConfigError, FinishReason, InvalidRequestError, SamplingParams
from kvferry.engine import LLM

PROMPTS = [[(7 * i + 3 * n) % 400 for i in range(n)] for n in (1, 15, 16, 33, 100)]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> LLM:
    return LLM(tiny_llama_dir, beam_width=4, kv_bytes=8 << 20, threads=1)


def given(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_sequences_and_scores_are_those_of_transformers(
    width: int, llm: LLM, reference: Any, tiny_llama_dir: Path
) -> None:
    model = reference.load(tiny_llama_dir)
    model.generation_config.eos_token_id = None
    completions = llm.beam_search(given(PROMPTS), width, 20, ignore_eos=True)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        if width == 1:
            expected = [(reference.greedy(model, prompt, 20), completion.sequences[0].score)]
        else:
            expected = transformers_beams(model, prompt, width, 20)
        assert [sequence.token_ids for sequence in completion.sequences] == [tokens for tokens, _ in expected]
        assert [s.score for s in completion.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert {sequence.finish_reason for sequence in completion.sequences} == {FinishReason.LENGTH}
    counts = llm.manager.counts()
    assert counts.free == counts.total
    llm.manager.check_integrity()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_beams_that_end_early_end_as_theirs_do(
    penalty: float, early: bool, llm: LLM, reference: Any, tiny_llama_dir: Path
) -> None:
    model = reference.load(tiny_llama_dir)
    model.generation_config.eos_token_id = None
    prompt = PROMPTS[2]
    stop = transformers_beams(model, prompt, 4, 20)[1][0][6]  # a token that beams do come to
    expected = transformers_beams(model, prompt, 4, 20, eos=stop, length_penalty=penalty, early_stopping=early)
    [completion] = llm.beam_search(
        given([prompt]),
        4,
        20,
        length_penalty=penalty,
        early_stopping=early,
        ignore_eos=True,
        stop_token_ids=[stop],
    )
    assert [sequence.token_ids for sequence in completion.sequences] == [tokens for tokens, _ in expected]
    assert [s.score for s in completion.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)
    stopped = [sequence for sequence in completion.sequences if sequence.finish_reason is FinishReason.STOP]
    assert stopped or penalty > 2, "a large penalty prefers those that go on"
    for sequence in stopped:
        assert sequence.token_ids[-1] == stop
        assert sequence.text == llm.tokenizer.decode(sequence.token_ids[:-1])


def test_the_score_is_the_model_s_probability_of_the_sequence(llm: LLM, reference: Any, tiny_llama_dir: Path) -> None:
    [completion] = llm.beam_search(["The quick brown fox"], 3, 12, ignore_eos=True)
    prompt = llm.tokenizer.encode("The quick brown fox")
    for sequence in completion.sequences:
        logits = reference.logits(reference.load(tiny_llama_dir), [*prompt, *sequence.token_ids])
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = float(logprobs.gather(1, torch.tensor(sequence.token_ids)[:, None]).sum())
        assert sequence.cumulative_logprob == pytest.approx(expected, abs=1e-3)
        assert sequence.score == pytest.approx(sequence.cumulative_logprob / 12)
    scores = [sequence.score for sequence in completion.sequences]
    assert scores == sorted(scores, reverse=True)


def test_a_pool_for_one_search_serves_many_one_after_another(llm: LLM, tiny_llama_dir: Path, reference: Any) -> None:
    slot_nbytes = llm.manager.pools[0].layout.slot_nbytes
    small = LLM(tiny_llama_dir, beam_width=4, kv_bytes=14 * slot_nbytes, threads=1, step_token_budget=16)
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 50]
    few, many = small.beam_search(given(prompts), 4, 20), llm.beam_search(given(prompts), 4, 20)
    assert [[s.token_ids for s in c.sequences] for c in few] == [[s.token_ids for s in c.sequences] for c in many]
    small.manager.check_integrity()
    counts = small.manager.counts()
    assert counts.free == counts.total == 14
    with pytest.raises(InvalidRequestError, match=r"KV blocks, but the pool has 14") as caught:
        small.beam_search(given(PROMPTS), 4, 100)
    assert caught.value.field == "beam_width"


def test_two_ranks_copy_the_same_blocks_and_find_the_same_beams(llm: LLM, tiny_llama_dir: Path) -> None:
    alone = llm.beam_search(given(PROMPTS), 3, 12, ignore_eos=True)
    with LLM(tiny_llama_dir, beam_width=3, kv_bytes=8 << 20, threads=1, tensor_parallel=2) as both:
        found = both.beam_search(given(PROMPTS), 3, 12, ignore_eos=True)
    assert [[s.token_ids for s in c.sequences] for c in found] == [[s.token_ids for s in c.sequences] for c in alone]


def test_a_prompt_searched_before_is_found_in_the_cache(llm: LLM) -> None:
    prompt = [(13 * i) % 400 for i in range(64)]
    [first] = llm.beam_search(given([prompt]), 2, 8)
    before = llm.manager.statistics().reused_tokens
    [second] = llm.beam_search(given([prompt]), 2, 8)
    assert second == first
    assert llm.manager.statistics().reused_tokens == before + 48
    [greedy] = llm.generate(given([prompt]), SamplingParams(temperature=0, max_tokens=8))
    assert greedy.usage.cached_tokens == 48


def test_a_failed_search_gives_every_block_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(llm._runner, "forward", fail)
        with pytest.raises(RuntimeError, match="no luck"):
            llm.beam_search(given(PROMPTS), 2, 4)
    counts = llm.manager.counts()
    assert counts.free == counts.total


def test_v2_serves_none_and_asking_for_beams_gets_v1(llm: LLM, tiny_llama_dir: Path) -> None:
    assert (llm.resolution.manager, llm.resolution.manager_source.value) == ("V1", "demoted")
    with LLM(tiny_llama_dir, manager="V2", kv_bytes=8 << 20, threads=1) as other:
        with pytest.raises(ConfigError, match=r"V2 serves no beam search") as caught:
            other.beam_search(["Hello"], 2, 4)
        assert caught.value.field == "beam_width"
        assert other.manager.counts().free == other.manager.counts().total


@pytest.mark.parametrize(
    ("prompt", "arguments", "field"),
    [
        ({"prompt_token_ids": []}, (2, 4), "prompt"),
        ("x", (2, 5000), "max_tokens"),
        ("x", (0, 4), "beam_width"),
    ],
)
def test_what_cannot_be_searched_is_named(llm: LLM, prompt: Any, arguments: tuple[int, int], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.beam_search([prompt], *arguments)
    assert caught.value.field == field
