"""Clusters of plain processes over a tiny model, and what is the right answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from plain_cluster import PlainCluster

from kvferry.cli.client import Completed
from kvferry.engine import LLM

LEASE_S = 2.0
BLOCK = 16
BLOCK_NBYTES = BLOCK * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dim, fp32

StartCluster = Callable[..., PlainCluster]
Golden = Callable[[Sequence[int], Completed], None]


@pytest.fixture(scope="session")
def start_plain(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Iterator[StartCluster]:
    """start_plain(prefill=1, decode=1, blocks=256, faulty=("decode-0",), **{"transceiver.lease_s": 2})."""
    started: list[PlainCluster] = []

    def start(
        prefill: int = 1, decode: int = 1, blocks: int = 256, faulty: Sequence[str] = (), **settings: Any
    ) -> PlainCluster:
        work_dir = tmp_path_factory.mktemp("faults")
        chosen = {"kv_cache.bytes": blocks * BLOCK_NBYTES, "engine.threads": 1, "state_dir": work_dir, **settings}
        cluster = PlainCluster(tiny_llama_dir, work_dir, chosen, frozenset(faulty))
        started.append(cluster)
        cluster.start(prefill, decode)
        return cluster

    yield start
    for cluster in started:
        cluster.close()


@pytest.fixture(scope="session")
def aggregated(tiny_llama_dir: Path) -> Iterator[LLM]:
    """The same model on one worker in this process."""
    with LLM(tiny_llama_dir, kv_bytes=1024 * BLOCK_NBYTES, threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def golden(reference: Any, assert_golden: Any, tiny_llama_dir: Path) -> Golden:
    """golden(prompt, completed): the answer is what transformers says, greedily."""
    model = reference.load(tiny_llama_dir)

    def check(prompt: Sequence[int], completed: Completed) -> None:
        assert_golden(model, prompt, completed.token_ids)

    return check


@pytest.fixture(scope="session")
def prompt() -> Callable[[int, int], list[int]]:
    """prompt(length, seed): token ids, never special ones, that differ between seeds from the first block on."""

    def make(length: int, seed: int) -> list[int]:
        numbers = random.Random(seed)
        return [numbers.randrange(3, 480) for _ in range(length)]

    return make


@pytest.fixture(scope="session")
def pair(start_plain: StartCluster) -> PlainCluster:
    """One prefill worker that takes prompts in small steps and one decode worker, for all tests that leave them
    as they found them. Its leases are short."""
    settings = {"transceiver.lease_s": LEASE_S, "prefill.engine.step_token_budget": 16, "engine.max_batch": 256}
    return start_plain(1, 1, 256, **settings)
