"""One prefill and one decode worker over shared memory: golden answers, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

KV_TOKEN_NBYTES = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, dim, fp32


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Any]) -> Iterator[Any]:
    return start_cluster("--kv_cache.bytes", "256MiB", "--backend", "SHM")


def test_the_pair_resolves_to_shared_memory(cluster: Any) -> None:
    for worker in cluster.facts["workers"]:
        assert (worker["resolution"]["transceiver"], worker["resolution"]["manager"]) == ("SHM/PYTHON", "V2")


@pytest.mark.parametrize("length", [1, 16, 65, 700])
def test_answers_are_golden(
    cluster: Any, reference: Any, smollm2_dir: Path, assert_golden: Any, long_ids: list[int], length: int
) -> None:
    prompt = long_ids[-length:]
    completed = cluster.complete(prompt)
    assert_golden(reference.load(smollm2_dir), prompt, completed.token_ids)
    assert completed.route["disaggregated"]
    assert completed.route["transferred_bytes"] == length * KV_TOKEN_NBYTES


def test_blocks_return_and_the_file_system_knows_nothing(cluster: Any) -> None:
    cluster.settled()
    assert [path.name for path in Path("/dev/shm").iterdir() if "kvferry" in path.name] == []
