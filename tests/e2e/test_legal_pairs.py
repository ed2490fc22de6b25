"""Legal pairs other than the preferred one: each says what it is and answers like the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_python_runtime_with_manager_v1(
    start_cluster: Callable[..., Any],
    reference: Any,
    smollm2_dir: Path,
    assert_golden: Any,
    long_ids: list[int],
) -> None:
    cluster = start_cluster("--manager", "V1", "--kv_cache.bytes", "128MiB")
    for worker in cluster.facts["workers"]:
        resolution = worker["resolution"]
        assert (resolution["transceiver"], resolution["runtime_source"]) == ("NIXL/PYTHON", "model")
        assert (resolution["manager"], resolution["manager_source"]) == ("V1", "user")
        log = (cluster.state_dir / "logs" / f"{worker['name']}.log").read_text()
        assert "kv_manager=V1 kv_manager_source=user" in log
    model = reference.load(smollm2_dir)
    for length in (1, 16, 17, 130):
        prompt = long_ids[-length:]
        completed = cluster.complete(prompt)
        assert completed.route["disaggregated"]
        assert_golden(model, prompt, completed.token_ids)
    again = cluster.complete(prompt)
    assert again.token_ids == completed.token_ids
    assert again.usage["cached_tokens"] == 128
    cluster.settled()
