"""What the cache manager and its core may never change: the tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvferry.core import SamplingParams
from kvferry.engine import LLM, Completion

# 24 blocks of 8 tokens: a few of these prompts at a time, so that prefixes are shared, evicted and preempted.
POOL_TOKENS, BLOCK_TOKENS = 24 * 8, 8


def _outputs(model_dir: Path, manager: str, core: str) -> list[Completion]:
    rng = random.Random(0)
    system = [rng.randrange(3, 480) for _ in range(26)]
    prompts = [
        {"prompt_token_ids": system + [rng.randrange(3, 480) for _ in range(rng.randrange(40))]} for _ in range(12)
    ]
    probe = LLM(model_dir, manager=manager, tokens_per_block=BLOCK_TOKENS, kv_bytes=1 << 20, threads=1)
    slot_nbytes = probe.manager.pools[0].layout.slot_nbytes
    llm = LLM(
        model_dir,
        manager=manager,
        kv_core=core,
        kv_bytes=POOL_TOKENS // BLOCK_TOKENS * slot_nbytes,
        tokens_per_block=BLOCK_TOKENS,
        threads=1,
        step_token_budget=64,
        max_step_ms=1e9,  # what a step holds must not depend on how fast the last one was
    )
    assert llm.manager.core == core
    completions = llm.generate(prompts, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=2))
    counts = llm.manager.counts()
    assert counts.free == counts.total == POOL_TOKENS // BLOCK_TOKENS
    return completions


@pytest.fixture(scope="module")
def python_core(tiny_llama_dir: Path) -> list[Completion]:
    return _outputs(tiny_llama_dir, "V2", "python")


def test_both_cores_give_bitwise_identical_answers(tiny_llama_dir: Path, python_core: list[Completion]) -> None:
    cpp = _outputs(tiny_llama_dir, "V2", "cpp")
    assert [(c.token_ids, c.logprobs, c.usage) for c in cpp] == [
        (c.token_ids, c.logprobs, c.usage) for c in python_core
    ]
    assert any(completion.usage.cached_tokens for completion in cpp)
