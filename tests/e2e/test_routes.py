"""Every route beside the preferred one, prefill and decode in processes of their own: golden answers, blocks back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from libraries import needs_mooncake

KV_TOKEN_NBYTES = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, dim, fp32
LENGTHS = (1, 16, 65, 700)

# settings -> the pair each role must have resolved to
ROUTES = {
    "nixl-v1": (("--manager", "V1"), ("NIXL/PYTHON", "V1"), ("NIXL/PYTHON", "V1")),
    "shm": (("--backend", "SHM"), ("SHM/PYTHON", "V2"), ("SHM/PYTHON", "V2")),
    "shm-cpp": (("--backend", "SHM", "--runtime", "CPP"), ("SHM/CPP", "V1"), ("SHM/CPP", "V1")),
    "nixl-cpp": (("--runtime", "CPP"), ("NIXL/CPP", "V1"), ("NIXL/CPP", "V1")),
    "ucx": (("--backend", "UCX"), ("UCX/CPP", "V1"), ("UCX/CPP", "V1")),
    "mooncake": (
        ("--backend", "MOONCAKE", "--insecure_bind", "true"),
        ("MOONCAKE/PYTHON", "V2"),
        ("MOONCAKE/PYTHON", "V2"),
    ),
    "nixl-cpp-decode-first": (
        ("--runtime", "CPP", "--router.schedule", "decode_first"),
        ("NIXL/CPP", "V1"),
        ("NIXL/CPP", "V1"),
    ),
    "shm-decode-first": (
        ("--backend", "SHM", "--router.schedule", "decode_first"),
        ("SHM/PYTHON", "V2"),
        ("SHM/PYTHON", "V2"),
    ),
    "nixl-v1-decode-first": (
        ("--manager", "V1", "--router.schedule", "decode_first"),
        ("NIXL/PYTHON", "V1"),
        ("NIXL/PYTHON", "V1"),
    ),
    "ucx-decode-first": (
        ("--backend", "UCX", "--router.schedule", "decode_first"),
        ("UCX/CPP", "V1"),
        ("UCX/CPP", "V1"),
    ),
    "ucx-decode-first-pull": (
        ("--backend", "UCX", "--router.schedule", "decode_first", "--router.flow", "pull"),
        ("UCX/CPP", "V1"),
        ("UCX/CPP", "V1"),
    ),
    "nixl-mixed-decode-first": (
        ("--manager", "V1", "--decode.transceiver.runtime", "CPP", "--router.schedule", "decode_first"),
        ("NIXL/PYTHON", "V1"),
        ("NIXL/CPP", "V1"),
    ),
    "nixl-mixed": (
        ("--runtime", "PYTHON", "--manager", "V1", "--decode.transceiver.runtime", "CPP"),
        ("NIXL/PYTHON", "V1"),
        ("NIXL/CPP", "V1"),
    ),
}


@pytest.mark.parametrize(
    "route", [pytest.param(route, marks=needs_mooncake if route == "mooncake" else ()) for route in ROUTES]
)
def test_answers_are_golden_and_blocks_return(
    start_cluster: Callable[..., Any],
    reference: Any,
    smollm2_dir: Path,
    assert_golden: Any,
    long_ids: list[int],
    route: str,
) -> None:
    settings, prefill, decode = ROUTES[route]
    cluster = start_cluster("--kv_cache.bytes", "256MiB", *settings)
    pairs = {worker["role"]: worker["resolution"] for worker in cluster.facts["workers"]}
    assert (pairs["prefill"]["transceiver"], pairs["prefill"]["manager"]) == prefill
    assert (pairs["decode"]["transceiver"], pairs["decode"]["manager"]) == decode
    for worker in cluster.facts["workers"]:
        log = (cluster.state_dir / "logs" / f"{worker['name']}.log").read_text()
        transceiver, manager = worker["resolution"]["transceiver"], worker["resolution"]["manager"]
        lines = [line for line in log.splitlines() if f"resolved worker={worker['name']} role={worker['role']}" in line]
        assert len(lines) == 1
        assert f"transceiver={transceiver} " in lines[0]
        assert f"kv_manager={manager} " in lines[0]
    for length in LENGTHS:
        prompt = long_ids[-length:]
        completed = cluster.complete(prompt)
        assert_golden(reference.load(smollm2_dir), prompt, completed.token_ids)
        assert completed.route["transferred_bytes"] == length * KV_TOKEN_NBYTES
    cluster.settled()
    cluster.run("down")
