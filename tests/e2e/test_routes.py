"""Every route beside the preferred one, prefill and decode in processes of their own: golden answers, blocks back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from libraries import needs_mooncake
from plain_cluster import running_pair

KV_TOKEN_NBYTES = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, dim, fp32
LENGTHS = (1, 16, 65, 700)

# settings -> the pair each role must have resolved to
ROUTES = {
    "nixl-v1": ({"kv_cache.manager": "V1"}, ("NIXL/PYTHON", "V1"), ("NIXL/PYTHON", "V1")),
    "shm": ({"transceiver.backend": "SHM"}, ("SHM/PYTHON", "V2"), ("SHM/PYTHON", "V2")),
    "shm-cpp": ({"transceiver.backend": "SHM", "transceiver.runtime": "CPP"}, ("SHM/CPP", "V1"), ("SHM/CPP", "V1")),
    "nixl-cpp": ({"transceiver.runtime": "CPP"}, ("NIXL/CPP", "V1"), ("NIXL/CPP", "V1")),
    "ucx": ({"transceiver.backend": "UCX"}, ("UCX/CPP", "V1"), ("UCX/CPP", "V1")),
    "mooncake": (
        {"transceiver.backend": "MOONCAKE", "insecure_bind": "true"},
        ("MOONCAKE/PYTHON", "V2"),
        ("MOONCAKE/PYTHON", "V2"),
    ),
    "nixl-cpp-decode-first": (
        {"transceiver.runtime": "CPP", "router.schedule": "decode_first"},
        ("NIXL/CPP", "V1"),
        ("NIXL/CPP", "V1"),
    ),
    "shm-decode-first": (
        {"transceiver.backend": "SHM", "router.schedule": "decode_first"},
        ("SHM/PYTHON", "V2"),
        ("SHM/PYTHON", "V2"),
    ),
    "nixl-v1-decode-first": (
        {"kv_cache.manager": "V1", "router.schedule": "decode_first"},
        ("NIXL/PYTHON", "V1"),
        ("NIXL/PYTHON", "V1"),
    ),
    "ucx-decode-first": (
        {"transceiver.backend": "UCX", "router.schedule": "decode_first"},
        ("UCX/CPP", "V1"),
        ("UCX/CPP", "V1"),
    ),
    "ucx-decode-first-pull": (
        {"transceiver.backend": "UCX", "router.schedule": "decode_first", "router.flow": "pull"},
        ("UCX/CPP", "V1"),
        ("UCX/CPP", "V1"),
    ),
    "nixl-mixed-decode-first": (
        {"kv_cache.manager": "V1", "decode.transceiver.runtime": "CPP", "router.schedule": "decode_first"},
        ("NIXL/PYTHON", "V1"),
        ("NIXL/CPP", "V1"),
    ),
    "nixl-mixed": (
        {"transceiver.runtime": "PYTHON", "kv_cache.manager": "V1", "decode.transceiver.runtime": "CPP"},
        ("NIXL/PYTHON", "V1"),
        ("NIXL/CPP", "V1"),
    ),
}


@pytest.mark.parametrize(
    "route", [pytest.param(route, marks=needs_mooncake if route == "mooncake" else ()) for route in ROUTES]
)
def test_answers_are_golden_and_blocks_return(
    tmp_path: Path, reference: Any, smollm2_dir: Path, assert_golden: Any, long_ids: list[int], route: str
) -> None:
    settings, *pairs = ROUTES[route]
    common = {
        "kv_cache.bytes": 256 << 20,
        "router.lost_after_s": 60.0,  # a busy machine is no fault here
    }
    with running_pair(smollm2_dir, tmp_path, {**common, **settings}) as cluster:
        for name, (transceiver, manager) in zip(("prefill-0", "decode-0"), pairs, strict=True):
            server = cluster.servers[name]
            resolution = server.facts["resolution"]
            assert (resolution["transceiver"], resolution["manager"]) == (transceiver, manager)
            role = name.partition("-")[0]
            log = server.log.read_text().splitlines()
            (line,) = [line for line in log if f"resolved worker={name} role={role}" in line]
            assert f"transceiver={transceiver} " in line
            assert f"kv_manager={manager} " in line
        for length in LENGTHS:
            prompt = long_ids[-length:]
            completed = cluster.complete(prompt)
            assert_golden(reference.load(smollm2_dir), prompt, completed.token_ids)
            assert completed.route["transferred_bytes"] == length * KV_TOKEN_NBYTES
        cluster.assert_baseline()
