"""One worker in every precision and type of cache: compiled kernels and torch's agree, and stay near float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import SamplingParams
from kvferry.engine import KV_DTYPES, LLM

FIRST = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + (7 * i + 3 * n) % 390 for i in range(n)]} for n in (1, 16, 33, 129, 300)]


def make(model_dir: Path, precision: str, kv_dtype: str, **settings: Any) -> LLM:
    return LLM(model_dir, precision=precision, kv_dtype=KV_DTYPES[kv_dtype], kv_bytes=32 << 20, threads=1, **settings)


@cache
def first_logprobs(model_dir: Path, precision: str, kv_dtype: str, kernels: str) -> list[float]:
    """Of the likeliest token behind each prompt."""
    with make(model_dir, precision, kv_dtype, kernels=kernels) as llm:
        return [result.logprobs[0].logprob for result in llm.generate(PROMPTS, FIRST)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_both_kinds_of_kernels_agree(tiny_llama_dir: Path, precision: str, kv_dtype: str) -> None:
    native, torch = (first_logprobs(tiny_llama_dir, precision, kv_dtype, kernels) for kernels in ("native", "torch"))
    assert native == pytest.approx(torch, abs=1e-4 if (precision, kv_dtype) == ("fp32", "fp32") else 0.03)
    exact = first_logprobs(tiny_llama_dir, "fp32", "fp32", "native")
    assert native == pytest.approx(exact, abs=0.2)


@pytest.mark.parametrize("manager", ["V1", "V2"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_cached_prefix_is_read_as_it_was_written(tiny_llama_dir: Path, manager: str, kv_dtype: str) -> None:
    with make(tiny_llama_dir, "fp32", kv_dtype, manager=manager) as llm:
        [first] = llm.generate([PROMPTS[3]], GREEDY)
        [second] = llm.generate([PROMPTS[3]], GREEDY)
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 128)
        assert first.token_ids == second.token_ids
        assert llm.manager.counts().free == llm.manager.counts().total
        assert sum(pool.layout.token_nbytes for pool in llm.manager.pools) == {"bf16": 384, "int8": 240}[kv_dtype]
