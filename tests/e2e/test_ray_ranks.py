"""A Ray cluster whose workers are of several ranks: started by the command, and ranks killed under it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_checkpoint
from transformers import LlamaConfig

from kvferry.core import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LENGTHS = (1, 16, 17, 100)
SIZES = {"prefill-0": (2, 1), "decode-0": (1, 2)}
"""Tensor and pipeline parallel sizes."""
END_S = 15.0
"""How long the ranks of a worker that lost one may live on."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    config = LlamaConfig(
        vocab_size=509,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    directory = random_checkpoint(config, tmp_path_factory.mktemp("ranks"))
    for file in tiny_llama_dir.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Any], model_dir: Path) -> Any:
    sizes = [
        part
        for name, (tensor, pipeline) in SIZES.items()
        for key, size in (("tensor_parallel", tensor), ("pipeline_parallel", pipeline))
        for part in (f"--{name.partition('-')[0]}.engine.{key}", str(size))
    ]
    return start_cluster("--model", str(model_dir), "--kv_cache.bytes", "8MiB", "--engine.threads", "1", *sizes)


def ranks_of(status: dict[str, Any], worker: str) -> list[int]:
    return [rank["pid"] for rank in status[worker]["ranks"]]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def prompt_of(length: int, seed: int) -> list[int]:
    return [3 + (7 * i + 31 * seed + i * i % 13) % 200 for i in range(length)]


def test_status_and_the_resolved_line_tell_the_ranks(cluster: Any) -> None:
    status = cluster.settled()
    for name, (tensor, pipeline) in SIZES.items():
        worker = status[name]
        places = [(rank["rank"], rank["tp_rank"], rank["pp_rank"]) for rank in worker["ranks"]]
        assert places == [(rank, rank % tensor, rank // tensor) for rank in range(tensor * pipeline)]
        pids = ranks_of(status, name)
        assert pids[0] == worker["pid"]
        assert len(set(pids)) == 2
        assert all(alive(pid) for pid in pids)
        log = (cluster.state_dir / "logs" / f"{name}.log").read_text()
        assert f"tensor_parallel={tensor} pipeline_parallel={pipeline} reason=" in log


def test_answers_are_golden(cluster: Any, model_dir: Path, reference: Any, assert_golden: Any) -> None:
    model = reference.load(model_dir)
    for length in LENGTHS:
        prompt = prompt_of(length, length)
        completed = cluster.complete(prompt, GREEDY)
        assert completed.route["disaggregated"]
        assert completed.route["transferred_bytes"] == length * 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, fp32
        assert_golden(model, prompt, completed.token_ids)
    cluster.settled()


@pytest.mark.parametrize(("worker", "victim"), [("decode-0", 1), ("prefill-0", 1), ("prefill-0", 0)])
def test_a_killed_rank_ends_its_worker_and_ray_starts_it_again(
    cluster: Any, model_dir: Path, reference: Any, assert_golden: Any, worker: str, victim: int
) -> None:
    before = cluster.settled()
    pids = ranks_of(before, worker)
    os.kill(pids[victim], signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if alive(pid)]} of {pids} live on"
        time.sleep(0.05)

    def back(status: dict[str, dict[str, Any]]) -> bool:
        found = status.get(worker, {})
        return found.get("state") == "ready" and found["incarnation"] != before[worker]["incarnation"]

    after = cluster.eventually(back, f"{worker} does not come back")
    assert set(ranks_of(after, worker)).isdisjoint(pids)
    cluster.settled()
    # The first requests may still find decode without contact to the new prefill.
    prompt = prompt_of(50, sum(pids))
    completed = cluster.complete(prompt, GREEDY)
    assert_golden(reference.load(model_dir), prompt, completed.token_ids)
    cluster.settled()
