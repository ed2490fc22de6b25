"""Every family on the engine: chunked prefill, both managers, batches and prefix reuse give transformers' tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_checkpoint
from families import BLOCK, FAMILIES, LENGTHS, NEEDS_V2, WITHOUT_REUSE
from reference_beams import transformers_beams

from kvferry.core import ConfigError, SamplingParams
from kvferry.engine import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def family_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Callable[[str], Path]:
    """A checkpoint of a family, with a tokenizer, written once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = random_checkpoint(FAMILIES[name](), tmp_path_factory.mktemp(name))
            for file in tiny_llama_dir.glob("tokenizer*"):
                shutil.copy(file, made[name])
        return made[name]

    return get


def cases() -> Iterator[Any]:
    for name in FAMILIES:
        yield pytest.param(name, "V2", id=f"{name}-V2")
        if name not in NEEDS_V2:
            yield pytest.param(name, "V1", id=f"{name}-V1")


def prompts_of(vocab: int) -> list[list[int]]:
    return [[3 + (7 * i + 31 * n + i * i % 13) % (vocab - 3) for i in range(n)] for n in LENGTHS]


@pytest.mark.parametrize(("name", "manager"), list(cases()))
def test_golden_at_every_boundary_and_again_from_the_cache(
    name: str, manager: str, family_dir: Callable[[str], Path], reference: Any, assert_golden: Any
) -> None:
    model_dir = family_dir(name)
    model = reference.load(model_dir)
    prompts = prompts_of(model.config.vocab_size)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    reuse = (name, manager) not in WITHOUT_REUSE
    settings: dict[str, Any] = {"threads": 1, "tokens_per_block": BLOCK, "prefix_reuse": reuse}
    with LLM(model_dir, manager=manager, kv_bytes=16 << 20, step_token_budget=22, **settings) as llm:
        assert llm.manager.version == manager
        first, again = llm.generate(asked, GREEDY), llm.generate(asked, GREEDY)
        for prompt, cold, warm in zip(prompts, first, again, strict=True):
            assert len(cold.token_ids) == len(warm.token_ids) == 32
            assert_golden(model, prompt, cold.token_ids)
            assert_golden(model, prompt, warm.token_ids)
            assert warm.usage.cached_tokens == ((len(prompt) - 1) // BLOCK * BLOCK if reuse else 0)
        llm.manager.check_integrity()
        assert llm.manager.counts().free == llm.manager.counts().total


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_computed_in_chunks_is_the_prompt_computed_whole(name: str, family_dir: Callable[[str], Path]) -> None:
    """Down to the log probabilities: a step of 7 tokens starts and ends inside blocks, windows and chunks."""
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=5)
    prompt = {"prompt_token_ids": prompts_of(200)[-1]}
    results = []
    for budget in (7, 512):
        with LLM(family_dir(name), kv_bytes=4 << 20, threads=1, step_token_budget=budget) as llm:
            results += llm.generate([prompt], sampling)
    chunked, whole = results
    assert chunked.token_ids == whole.token_ids
    for ours, theirs in zip(chunked.logprobs, whole.logprobs, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


@pytest.mark.parametrize(
    ("manager", "core", "host_bytes"), [("V2", "cpp", 1 << 20), ("V2", "python", 0), ("V2", "cpp", 0), ("V1", "cpp", 0)]
)
def test_states_survive_a_pool_that_is_too_small(
    manager: str, core: str, host_bytes: int, family_dir: Callable[[str], Path], reference: Any, assert_golden: Any
) -> None:
    """Requests are suspended, with their states, where there is a tier below, else computed again."""
    model_dir = family_dir("nemotron_h")
    model = reference.load(model_dir)
    prompts = [prompt[:60] for prompt in prompts_of(model.config.vocab_size) if len(prompt) >= 47]
    settings: dict[str, Any] = {"threads": 1, "tokens_per_block": BLOCK, "prefix_reuse": manager == "V2"}
    pool: dict[str, Any] = {"kv_bytes": 80_000, "kv_host_bytes": host_bytes, "kv_core": core}
    with LLM(model_dir, manager=manager, snapshot_tokens=32, **pool, **settings) as llm:
        for completion, prompt in zip(
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], LONG), prompts, strict=True
        ):
            assert len(completion.token_ids) == LONG.max_tokens
            assert_golden(model, prompt, completion.token_ids)
        counted = llm.manager.statistics()
        assert counted.refused_reservations > 0, "the pool was large enough"
        assert (counted.resumptions > 0) == (host_bytes > 0)
        llm.manager.check_integrity()
        assert llm.manager.counts().free == llm.manager.counts().total


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "deepseek", "mixtral"])
def test_beams_are_those_of_transformers(name: str, family_dir: Callable[[str], Path], reference: Any) -> None:
    model_dir = family_dir(name)
    model = reference.load(model_dir)
    model.generation_config.eos_token_id = None
    prompts = [[3 + (5 * i + n) % 200 for i in range(n)] for n in (15, 33)]
    with LLM(model_dir, beam_width=3, kv_bytes=8 << 20, threads=1, tokens_per_block=BLOCK) as llm:
        found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], 3, 12, ignore_eos=True)
    for prompt, completion in zip(prompts, found, strict=True):
        expected = transformers_beams(model, prompt, 3, 12)
        assert [sequence.token_ids for sequence in completion.sequences] == [tokens for tokens, _ in expected]
        assert [s.score for s in completion.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_a_model_with_states_has_no_beams(family_dir: Callable[[str], Path]) -> None:
    with LLM(family_dir("nemotron_h"), beam_width=2, kv_bytes=8 << 20, threads=1, tokens_per_block=BLOCK) as llm:
        with pytest.raises(ConfigError, match="recurrent states") as caught:
            llm.beam_search([{"prompt_token_ids": [3, 4, 5]}], 2, 4)
        assert caught.value.field == "beam_width"
        assert llm.manager.counts().free == llm.manager.counts().total
