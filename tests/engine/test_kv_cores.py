"""What the cache manager and its core may never change: the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import SamplingParams
from kvferry.engine import LLM, Completion

# 24 blocks of 8 tokens: a few of these prompts at a time, so that prefixes are shared, evicted and preempted.
POOL_TOKENS, BLOCK_TOKENS = 24 * 8, 8


def _prompts() -> list[list[int]]:
    rng = random.Random(0)
    system = [rng.randrange(3, 480) for _ in range(26)]
    return [system + [rng.randrange(3, 480) for _ in range(rng.randrange(40))] for _ in range(12)]


def _engine(model_dir: Path, core: str, host_blocks: int = 0, min_partial: int = 0, manager: str = "V2") -> LLM:
    probe = LLM(model_dir, manager=manager, tokens_per_block=BLOCK_TOKENS, kv_bytes=1 << 20, threads=1)
    slot_nbytes = probe.manager.pools[0].layout.slot_nbytes
    return LLM(
        model_dir,
        manager=manager,
        kv_core=core,
        kv_bytes=POOL_TOKENS // BLOCK_TOKENS * slot_nbytes,
        kv_host_bytes=host_blocks * slot_nbytes,
        tokens_per_block=BLOCK_TOKENS,
        threads=1,
        step_token_budget=64,
        min_partial_tokens=min_partial,
        max_step_ms=1e9,  # what a step holds must not depend on how fast the last one was
    )


def _outputs(llm: LLM) -> list[Completion]:
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=2)
    completions = llm.generate([{"prompt_token_ids": prompt} for prompt in _prompts()], sampling)
    counts = llm.manager.counts()
    assert counts.free == counts.total == POOL_TOKENS // BLOCK_TOKENS
    return completions


def test_both_cores_give_bitwise_identical_answers(tiny_llama_dir: Path) -> None:
    outputs = []
    for core in ("cpp", "python"):
        llm = _engine(tiny_llama_dir, core)
        assert llm.manager.core == core
        outputs.append(_outputs(llm))
    cpp, python = ([(c.token_ids, c.logprobs, c.usage) for c in completions] for completions in outputs)
    assert cpp == python
    assert any(usage.cached_tokens for _, _, usage in cpp)


@pytest.mark.parametrize("manager", ["V1", "V2"])
def test_requests_suspended_to_the_host_tier_are_answered_as_if_they_had_been_alone(
    manager: str,
    tiny_llama_dir: Path,
    reference: Any,
    assert_golden: Callable[..., int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = _engine(tiny_llama_dir, "cpp", host_blocks=200, manager=manager)
    model = reference.load(tiny_llama_dir)
    for prompt, completion in zip(_prompts(), _outputs(llm), strict=True):
        assert_golden(model, prompt, completion.token_ids)
    assert "(suspended)" in caplog.text
    (tier,) = llm.manager.tier_counts()
    assert tier.parked == 0
    assert tier.kept > 0


def test_reusing_parts_of_blocks_changes_no_answer(
    tiny_llama_dir: Path, reference: Any, assert_golden: Callable[..., int]
) -> None:
    model = reference.load(tiny_llama_dir)
    cached = []
    for min_partial in (0, 1):
        llm = _engine(tiny_llama_dir, "cpp", min_partial=min_partial)
        for prompt, completion in zip(_prompts(), _outputs(llm), strict=True):
            assert_golden(model, prompt, completion.token_ids)
        cached.append(llm.manager.statistics().reused_tokens)
    assert cached[1] > cached[0]
