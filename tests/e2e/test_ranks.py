"""Prefill and decode workers of unequal ranks, in processes of their own, without Ray."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_checkpoint
from families import BLOCK, FAMILIES
from plain_cluster import PlainCluster
from transformers import LlamaConfig

from kvferry.core import DType, SamplingParams, UnavailableError
from kvferry.models import inspect_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 33, 100)

Sizes = tuple[int, int]
"""Tensor and pipeline parallel sizes of one worker."""


def _checkpoint(name: str, work_dir: Path, tiny_llama_dir: Path) -> Path:
    """llama: 4 heads per kv head, of which there are 2."""
    llama = LlamaConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model_dir = random_checkpoint(llama if name == "llama" else FAMILIES[name](), work_dir / "model")
    for file in tiny_llama_dir.glob("tokenizer*"):
        shutil.copy(file, model_dir)
    return model_dir


def start_pair(
    name: str, prefill: Sizes, decode: Sizes, work_dir: Path, tiny_llama_dir: Path, **changes: Any
) -> PlainCluster:
    settings = {
        "kv_cache.manager": "V2",
        "kv_cache.bytes": 8 << 20,
        "kv_cache.tokens_per_block": BLOCK,
        "engine.threads": 1,
        "state_dir": work_dir,
        "transceiver.backend": "NIXL",
        "transceiver.runtime": "PYTHON",
        **changes,
    }
    for role, (tensor, pipeline) in (("prefill", prefill), ("decode", decode)):
        settings[f"{role}.engine.tensor_parallel"] = tensor
        settings[f"{role}.engine.pipeline_parallel"] = pipeline
    cluster = PlainCluster(_checkpoint(name, work_dir, tiny_llama_dir), work_dir, settings, start_s=480.0)
    try:
        cluster.start(prefill=1, decode=1)
    except BaseException:
        cluster.close()
        raise
    return cluster


def prompt_of(length: int, seed: int) -> list[int]:
    return [3 + (7 * i + 31 * seed + i * i % 13) % 200 for i in range(length)]


def expected_nbytes(model_dir: Path, tokens: int, copies: int) -> int:
    """Of a cold prompt without windows; copies: ranks of decode that each kv head goes to."""
    layouts = inspect_model(model_dir).layouts(BLOCK, DType.FLOAT32)
    return copies * sum(tokens * layout.token_nbytes for layout in layouts)


def ranks_of(cluster: PlainCluster, name: str) -> list[int]:
    return [rank.pid for rank in cluster.describe(name).ranks]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PAIRS = [
    ("llama", (2, 1), (1, 1)),
    ("llama", (1, 1), (2, 1)),
    ("llama", (2, 1), (1, 2)),
    ("llama", (1, 2), (1, 1)),
    pytest.param("llama", (1, 1), (1, 2), marks=pytest.mark.slow),
    pytest.param("llama", (1, 2), (1, 2), marks=pytest.mark.slow),
    pytest.param("llama", (2, 1), (2, 1), marks=pytest.mark.slow),
    pytest.param("llama", (1, 2), (2, 2), marks=pytest.mark.slow),
    ("llama", (2, 1), (4, 1)),  # kv heads are copied to two ranks each
    pytest.param("gemma3", (1, 2), (2, 1), marks=pytest.mark.slow),  # windows, and two layer groups on every stage
]


@pytest.mark.parametrize(("name", "prefill", "decode"), PAIRS, ids=lambda value: str(value).replace(", ", "x"))
def test_workers_of_unequal_ranks_are_golden(
    name: str,
    prefill: Sizes,
    decode: Sizes,
    tmp_path: Path,
    tiny_llama_dir: Path,
    reference: Any,
    assert_golden: Any,
) -> None:
    cluster = start_pair(name, prefill, decode, tmp_path, tiny_llama_dir)
    pids = []
    try:
        model = reference.load(cluster.model_dir)
        for worker, sizes in (("prefill-0", prefill), ("decode-0", decode)):
            ranks = cluster.describe(worker).ranks
            assert [rank.rank for rank in ranks] == list(range(sizes[0] * sizes[1]))
            assert [(rank.tp_rank, rank.pp_rank) for rank in ranks] == [
                (index % sizes[0], index // sizes[0]) for index in range(len(ranks))
            ]
            pids += [rank.pid for rank in ranks]
        assert all(alive(pid) for pid in pids)
        for length in LENGTHS:
            prompt = prompt_of(length, length)
            completed = cluster.complete(prompt, GREEDY)
            assert completed.route["disaggregated"]
            assert len(completed.token_ids) == 16
            assert_golden(model, prompt, completed.token_ids)
            if name == "llama":
                copies = max(1, decode[0] // 2)
                assert completed.route["transferred_bytes"] == expected_nbytes(cluster.model_dir, length, copies)
        again = cluster.complete(prompt_of(100, 100), GREEDY)
        assert_golden(model, prompt_of(100, 100), again.token_ids)
        assert again.route["transferred_bytes"] < completed.route["transferred_bytes"] / 4
        prompts: Sequence[list[int]] = [prompt_of(length, 50 + length) for length in (5, 20, 31, 64, 99, 120)]
        for prompt, completed in zip(prompts, cluster.complete_all(prompts, GREEDY), strict=True):
            assert_golden(model, prompt, completed.token_ids)
        cluster.assert_baseline()
    finally:
        cluster.close()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_decode_loads_while_ranks_compute(
    tmp_path: Path, tiny_llama_dir: Path, reference: Any, assert_golden: Any
) -> None:
    """Part by part, between workers that are divided in different ways; what arrives is whole on every rank."""
    changes = {"router.schedule": "decode_first", "engine.step_token_budget": 24}
    cluster = start_pair("llama", (1, 2), (2, 1), tmp_path, tiny_llama_dir, **changes)
    try:
        model = reference.load(cluster.model_dir)
        for length in (1, 24, 25, 100):
            prompt = prompt_of(length, length)
            completed = cluster.complete(prompt, GREEDY)
            assert completed.route["disaggregated"]
            assert_golden(model, prompt, completed.token_ids)
            assert completed.route["transferred_bytes"] == expected_nbytes(cluster.model_dir, length, 1)
        prompts = [prompt_of(length, 50 + length) for length in (5, 31, 64, 120)]
        for prompt, completed in zip(prompts, cluster.complete_all(prompts, GREEDY), strict=True):
            assert_golden(model, prompt, completed.token_ids)
        cluster.assert_baseline()
    finally:
        cluster.close()


def test_one_rank_killed_ends_the_worker_and_the_next_one_serves(
    tmp_path: Path, tiny_llama_dir: Path, reference: Any, assert_golden: Any
) -> None:
    """In the middle of requests, on the decode side; then again on the prefill side."""
    cluster = start_pair("llama", (2, 1), (2, 1), tmp_path, tiny_llama_dir)
    try:
        model = reference.load(cluster.model_dir)
        for worker in ("decode-0", "prefill-0"):
            pids = ranks_of(cluster, worker)
            assert len(pids) == 2
            os.kill(pids[1], signal.SIGKILL)
            assert cluster.servers[worker].wait() == 2, "rank 0 ends, and says that it could not go on"
            assert not any(alive(pid) for pid in pids)
            assert "rank 1 of this worker" in cluster.servers[worker].log.read_text()
            cluster.eventually(
                lambda worker=worker: not _ready(cluster, worker), f"the router still counts on {worker}", within_s=10
            )
            if worker == "decode-0":
                with pytest.raises(UnavailableError):
                    cluster.complete(prompt_of(20, 1), GREEDY)
            else:  # decode computes prompts itself where nobody else can
                alone = cluster.complete(prompt_of(20, 1), GREEDY)
                assert not alone.route["disaggregated"]
                assert_golden(model, prompt_of(20, 1), alone.token_ids)
            cluster.spawn_worker(worker)
            cluster.await_workers(["prefill-0", "decode-0"])
            assert set(ranks_of(cluster, worker)).isdisjoint(pids)
            prompt = prompt_of(40, len(pids))
            assert_golden(model, prompt, cluster.complete(prompt, GREEDY).token_ids)
        cluster.assert_baseline()
    finally:
        cluster.close()


def _ready(cluster: PlainCluster, worker: str) -> bool:
    return any(each.name == worker and each.state == "ready" for each in cluster.router_status().workers)


def test_requests_of_a_killed_rank_are_answered_by_another_worker(
    tmp_path: Path, tiny_llama_dir: Path, reference: Any, assert_golden: Any
) -> None:
    cluster = start_pair("llama", (1, 1), (2, 1), tmp_path, tiny_llama_dir)
    try:
        model = reference.load(cluster.model_dir)
        cluster.spawn_worker("decode-1")
        cluster.await_workers(["prefill-0", "decode-0", "decode-1"])
        long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        prompts = [prompt_of(20, seed) for seed in range(4)]
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = [threads.submit(cluster.complete, prompt, long) for prompt in prompts]
            cluster.eventually(
                lambda: cluster.describe("decode-1").requests.get("running", 0) > 0, "decode-1 gets no request"
            )
            os.kill(ranks_of(cluster, "decode-1")[1], signal.SIGKILL)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert len(answer.result().token_ids) == 200
                assert_golden(model, prompt, answer.result().token_ids)
        cluster.assert_baseline("prefill-0", "decode-0")
    finally:
        cluster.close()
