"""One prefill and one decode worker whose agents and forward passes misbehave on command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plain_cluster import PlainCluster

TIMEOUT_S = 3.0
LEASE_S = 2.0
IN_PARTS = {"router.schedule": "decode_first", "prefill.engine.step_token_budget": 64}
"""A prompt of 40 blocks is handed over in ten steps at least."""


def start_shaky(start_plain: Callable[..., PlainCluster], blocks: int, **settings: Any) -> PlainCluster:
    """blocks: of each worker's pool."""
    common = {
        "transceiver.transfer_timeout_ms": int(1000 * TIMEOUT_S),
        "transceiver.lease_s": LEASE_S,
        "router.worker_wait_s": 1,
    }
    return start_plain(1, 1, blocks, faulty=("prefill-0", "decode-0"), **common, **settings)
