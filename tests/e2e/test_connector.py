"""A pair of workers that keep their blocks in a folder, and find them there in their next life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plain_cluster import PlainCluster

PROMPT = [(11 * i) % 400 for i in range(100)]
TAIL_NBYTES = (100 - 96) * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dim, fp32


@pytest.mark.parametrize("runtime", ["PYTHON", "CPP"])
def test_restarted_workers_start_from_what_they_saved(
    runtime: str, tiny_llama_dir: Path, tmp_path: Path, reference: Any, assert_golden: Any
) -> None:
    settings = {
        "kv_cache.bytes": 4 << 20,
        "kv_cache.connector": "directory",
        "kv_cache.connector_address": tmp_path / "blocks",
        "transceiver.backend": "SHM",
        "transceiver.runtime": runtime,
        "engine.threads": 1,
        "state_dir": tmp_path,
    }
    cluster = PlainCluster(tiny_llama_dir, tmp_path, settings)
    names = ["prefill-0", "decode-0"]
    try:
        cluster.start(1, 1)
        assert {worker.resolution.manager for worker in cluster.router_status().workers} == {"V1"}
        first = cluster.complete(PROMPT)
        assert (first.usage["cached_tokens"], first.route["disaggregated"]) == (0, True)
        assert first.route["transferred_bytes"] >= TAIL_NBYTES
        cluster.assert_baseline()

        for name in names:  # what is still to be written is written when a worker ends
            cluster.spawn_worker(name)
        cluster.await_workers(names)
        second = cluster.complete(PROMPT)
        assert second.token_ids == first.token_ids
        assert_golden(reference.load(tiny_llama_dir), PROMPT, second.token_ids)
        assert second.usage["cached_tokens"] == 96
        assert second.route["transferred_bytes"] == TAIL_NBYTES, "decode found the full blocks too"
        cluster.assert_baseline()
    finally:
        cluster.close()
