"""Legal pairs other than the preferred one: each says what it is and answers like the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAIRS = [
    # flags, transceiver, its source, manager, its source
    (("--manager", "V1"), "NIXL/PYTHON", "model", "V1", "user"),
    (("--runtime", "CPP"), "NIXL/CPP", "user", "V1", "demoted"),
    (("--backend", "SHM", "--runtime", "CPP"), "SHM/CPP", "user", "V1", "demoted"),
]


@pytest.mark.parametrize(
    ("flags", "transceiver", "runtime_source", "manager", "manager_source"), PAIRS, ids=[row[1] for row in PAIRS]
)
def test_a_legal_pair_logs_its_line_and_is_golden(
    flags: tuple[str, ...],
    transceiver: str,
    runtime_source: str,
    manager: str,
    manager_source: str,
    start_cluster: Callable[..., Any],
    reference: Any,
    smollm2_dir: Path,
    assert_golden: Any,
    long_ids: list[int],
) -> None:
    cluster = start_cluster(*flags, "--kv_cache.bytes", "128MiB")
    line = (
        f"transceiver={transceiver} transceiver_source={runtime_source} "
        f"kv_manager={manager} kv_manager_source={manager_source} "
    )
    for worker in cluster.facts["workers"]:
        resolution = worker["resolution"]
        assert (resolution["transceiver"], resolution["runtime_source"]) == (transceiver, runtime_source)
        assert (resolution["manager"], resolution["manager_source"]) == (manager, manager_source)
        assert (cluster.state_dir / "logs" / f"{worker['name']}.log").read_text().count(line) == 1
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
