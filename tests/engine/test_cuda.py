"""The engine on a GPU against the CPU. Reported as not run where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.core import DType, SamplingParams
from kvferry.engine import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the GPU path was not run")

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * n) % 400 for i in range(n)] for n in (1, 16, 33, 129, 700)]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_golden_tokens(tiny_llama_dir: Path, reference: Any, assert_golden: Any, kernels: str) -> None:
    model = reference.load(tiny_llama_dir)
    with LLM(tiny_llama_dir, device="cuda", kernels=kernels, kv_bytes=64 << 20) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_golden(model, prompt, result.token_ids)


@pytest.mark.parametrize("kv_dtype", [DType.BFLOAT16, DType.INT8])
def test_half_precision_answers(tiny_llama_dir: Path, kv_dtype: DType) -> None:
    with LLM(tiny_llama_dir, device="cuda", precision="bf16", kv_dtype=kv_dtype, kv_bytes=64 << 20) as llm:
        [first] = llm.generate([{"prompt_token_ids": PROMPTS[3]}], GREEDY)
        [second] = llm.generate([{"prompt_token_ids": PROMPTS[3]}], GREEDY)
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 32
