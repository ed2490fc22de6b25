"""One aggregated worker of several ranks, a process each: it says what one rank says, and ends as a whole."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_checkpoint
from families import BLOCK, FAMILIES
from transformers import LlamaConfig

from kvferry.core import ConfigError, SamplingParams
from kvferry.engine import LLM, RankLostError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 33, 64, 100)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Callable[[str], Path]:
    """A checkpoint with a tokenizer, written once: a family's, or `llama` with 6 heads on 2 kv heads."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            config = LlamaConfig(
                vocab_size=211,
                hidden_size=48,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=12,
                num_key_value_heads=2,
                max_position_embeddings=512,
                initializer_range=0.2,
            )
            given = config if name == "llama" else FAMILIES[name]()
            made[name] = random_checkpoint(given, tmp_path_factory.mktemp(name))
            for file in tiny_llama_dir.glob("tokenizer*"):
                shutil.copy(file, made[name])
        return made[name]

    return get


def prompts() -> list[list[int]]:
    return [[3 + (7 * i + 31 * n + i * i % 13) % 200 for i in range(n)] for n in LENGTHS]


def children_of(llm: LLM) -> list[int]:
    leader = llm._runner.leader
    assert leader is not None
    return [child.pid for child in leader.children]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "manager", "tensor", "pipeline"),
    [
        ("llama", "V2", 2, 1),
        ("llama", "V1", 1, 2),
        pytest.param(*("llama", "V2", 2, 2), marks=pytest.mark.slow),
        ("llama", "V2", 4, 1),  # two ranks hold copies of each kv head
        pytest.param(*("gemma3", "V2", 2, 2), marks=pytest.mark.slow),  # two layer groups on each of two stages
        pytest.param(*("mistral", "V2", 2, 1), marks=pytest.mark.slow),
        pytest.param(*("qwen3_moe", "V1", 2, 1), marks=pytest.mark.slow),
    ],
)
def test_ranks_say_what_one_rank_says(
    name: str, manager: str, tensor: int, pipeline: int, model_dir: Any, reference: Any, assert_golden: Any
) -> None:
    """Cold and again from the cache, with prompts in chunks that end inside blocks."""
    directory = model_dir(name)
    model = reference.load(directory)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(
        directory,
        manager=manager,
        kv_bytes=8 << 20,
        threads=1,
        tokens_per_block=BLOCK,
        step_token_budget=50,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    ) as llm:
        pids = children_of(llm)
        assert len(pids) == tensor * pipeline - 1
        first, again = llm.generate(asked, GREEDY), llm.generate(asked, GREEDY)
        for prompt, cold, warm in zip(prompts(), first, again, strict=True):
            assert len(cold.token_ids) == len(warm.token_ids) == 24
            assert_golden(model, prompt, cold.token_ids)
            assert_golden(model, prompt, warm.token_ids)
            assert warm.usage.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        llm.manager.check_integrity()
        assert llm.manager.counts().free == llm.manager.counts().total
    assert not any(alive(pid) for pid in pids)


def test_sampling_logprobs_and_part_blocks_are_those_of_one_rank(model_dir: Any) -> None:
    """A block reused in part is copied, on every rank."""
    sampling = SamplingParams(seed=7, max_tokens=16, ignore_eos=True, logprobs=3)
    first, second = prompts()[-1], [*prompts()[-1][:90], 5, 6, 7]
    results = []
    for tensor, pipeline in ((1, 1), (2, 2)):
        with LLM(
            model_dir("llama"),
            manager="V2",
            kv_bytes=4 << 20,
            threads=1,
            min_partial_tokens=1,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        ) as llm:
            results.append([llm.generate([{"prompt_token_ids": prompt}], sampling)[0] for prompt in (first, second)])
    for one, several in zip(*results, strict=True):
        assert several.token_ids == one.token_ids
        assert several.usage == one.usage
        for ours, theirs in zip(several.logprobs, one.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert results[1][1].usage.cached_tokens == 90


def test_a_pool_too_small_preempts_and_stays_golden(model_dir: Any, reference: Any, assert_golden: Any) -> None:
    model = reference.load(model_dir("llama"))
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(
        model_dir("llama"), manager="V2", kv_bytes=600 << 10, threads=1, tensor_parallel=2, pipeline_parallel=1
    ) as llm:
        total = llm.manager.counts().total
        # 4 layers x 2 planes x 2 kv heads x 16 tokens x 4 dimensions x 4 bytes, over both ranks
        assert total == (600 << 10) // 4096
        for prompt, result in zip(prompts(), llm.generate(asked, GREEDY), strict=True):
            assert_golden(model, prompt, result.token_ids)


@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGKILL), pytest.param(3, signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_takes_the_worker_with_it(victim: int, number: int, model_dir: Any) -> None:
    llm = LLM(model_dir("llama"), kv_bytes=4 << 20, threads=1, tensor_parallel=2, pipeline_parallel=2)
    try:
        pids = children_of(llm)
        assert len(llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY)[0].token_ids) == 24
        os.kill(pids[victim - 1], number)
        for _ in range(2):  # and it stays so
            with pytest.raises(RankLostError, match="rank"):
                llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY)
    finally:
        llm.close()
    assert not any(alive(pid) for pid in pids)


def test_what_cannot_be_divided_is_refused_before_a_process_starts(model_dir: Any) -> None:
    for name, settings, field in (
        ("llama", {"tensor_parallel": 5}, "engine.tensor_parallel"),
        ("llama", {"pipeline_parallel": 5}, "engine.pipeline_parallel"),
        ("deepseek", {"tensor_parallel": 2}, "engine.tensor_parallel"),
        ("gemma3", {"pipeline_parallel": 4}, "engine.pipeline_parallel"),  # a stage without window layers
    ):
        with pytest.raises(ConfigError) as caught:
            LLM(model_dir(name), kv_bytes=4 << 20, **settings)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="no tiers below") as caught:
        LLM(model_dir("llama"), manager="V2", kv_bytes=4 << 20, kv_host_bytes=1 << 20, tensor_parallel=2)
    assert caught.value.field == "kv_cache.host_bytes"
