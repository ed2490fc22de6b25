"""Workers that wait for requests cost next to nothing, whichever route they move KV on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from plain_cluster import running_pair

from kvferry.transceiver.implementation import RuntimeTimes

PROMPT = [(11 * i) % 400 for i in range(100)]
WINDOW_S = 6.0
MAX_CORE_SHARE = 0.02

ROUTES = [
    ("NIXL", "PYTHON"),
    pytest.param(("NIXL", "CPP"), marks=pytest.mark.slow),
    pytest.param(("UCX", "CPP"), marks=pytest.mark.slow),
    pytest.param(("SHM", "PYTHON"), marks=pytest.mark.slow),
    pytest.param(("SHM", "CPP"), marks=pytest.mark.slow),
]


def cpu_s(pid: int) -> float:
    """Seconds of processor time, of all threads, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("route", ROUTES, ids="/".join)
def test_an_idle_worker_uses_less_than_a_fiftieth_of_a_core(
    route: tuple[str, str], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """After a request, once the prefill worker has stopped helping its new reader along."""
    backend, runtime = route
    settings = {
        "kv_cache.bytes": 4 << 20,
        "transceiver.backend": backend,
        "transceiver.runtime": runtime,
    }
    with running_pair(tiny_llama_dir, tmp_path, settings) as cluster:
        assert cluster.complete(PROMPT).route["disaggregated"] is True
        cluster.assert_baseline()
        time.sleep(RuntimeTimes(1.0).first_contact_s + 0.5)
        pids = {name: cluster.servers[name].pid for name in ("prefill-0", "decode-0")}
        before, started_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
        time.sleep(WINDOW_S)
        elapsed_s = time.monotonic() - started_s
        shares = {name: (cpu_s(pid) - before[name]) / elapsed_s for name, pid in pids.items()}
        assert max(shares.values()) < MAX_CORE_SHARE, shares
