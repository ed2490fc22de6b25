"""Disaggregated in lower precisions: the tokens of one aggregated worker of that precision, and fewer bytes moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from plain_cluster import running_pair

from kvferry.core import DType, SamplingParams
from kvferry.engine import KV_DTYPES, LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LENGTHS = (1, 16, 65, 700)
TOKEN_NBYTES = {DType.BFLOAT16: 30 * 2 * 3 * 128, DType.INT8: 30 * 2 * 3 * 68}  # layers, K and V, heads, row


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "backend"), [("int8", "int8", "NIXL"), ("fp32", "bf16", "SHM")], ids=["int8", "bf16"]
)
def test_answers_are_those_of_one_worker(
    tmp_path: Path,
    smollm2_dir: Path,
    long_ids: list[int],
    precision: str,
    kv_dtype: str,
    backend: str,
) -> None:
    prompts = [long_ids[-length:] for length in LENGTHS]
    stored = KV_DTYPES[kv_dtype]
    with LLM(smollm2_dir, precision=precision, kv_dtype=stored, kv_bytes=128 << 20, threads=1) as llm:
        expected = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    settings = {
        "engine.precision": precision,
        "kv_cache.dtype": kv_dtype,
        "kv_cache.bytes": 128 << 20,
        "router.lost_after_s": 60.0,  # a busy machine is no fault here
        "transceiver.backend": backend,
    }
    with running_pair(smollm2_dir, tmp_path, settings) as cluster:
        for prompt, alone in zip(prompts, expected, strict=True):
            completed = cluster.complete(prompt, GREEDY)
            assert completed.token_ids == alone.token_ids
            assert completed.route["transferred_bytes"] == len(prompt) * TOKEN_NBYTES[stored]
        cluster.assert_baseline()
