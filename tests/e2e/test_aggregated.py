"""Backend NONE: the decode count makes aggregated workers; and the foreground command cleans up after itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.cluster.processes import cluster_processes
from kvferry.cluster.state_file import read_state

COMMAND = str(Path(sys.executable).parent / "kvferry")


def test_an_aggregated_worker_answers_without_a_transfer(start_cluster: Callable[..., Any]) -> None:
    cluster = start_cluster("--backend", "NONE", "--decode", "1", "--kv_cache.bytes", "128MiB")
    (worker,) = cluster.facts["workers"]
    assert (worker["name"], worker["role"]) == ("aggregated-0", "aggregated")
    assert (worker["resolution"]["backend"], worker["resolution"]["runtime"]) == ("NONE", None)
    _, answer = cluster.run("generate", "--chat", "What is the capital of France?", "--temperature", "0")
    assert "Paris" in answer["text"]
    assert answer["route"] == {
        "prefill": "aggregated-0",
        "decode": "aggregated-0",
        "disaggregated": False,
        "transferred_bytes": 0,
        "retries": 0,
    }
    cluster.settled()


def test_ctrl_c_in_the_foreground_stops_everything(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [COMMAND, "up", "--backend", "NONE", "--decode", "1", "--kv_cache.bytes", "64MiB", "--json"],
        env={**os.environ, "KVFERRY_STATE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Whoever runs the tests in the background of a shell has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert '"cluster_id"' in process.stdout.readline()
        state = read_state(tmp_path)
        assert state is not None
        assert cluster_processes(state.cluster_id)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert cluster_processes(state.cluster_id) == []
    assert read_state(tmp_path) is None


def test_a_worker_that_cannot_start_is_named_and_nothing_stays(tmp_path: Path, smollm2_dir: Path) -> None:
    """A checkpoint without weights: only the worker finds out."""
    model = tmp_path / "model"
    model.mkdir()
    for file in smollm2_dir.iterdir():
        if file.suffix == ".json":
            (model / file.name).write_bytes(file.read_bytes())
    state_dir = tmp_path / "state"
    done = subprocess.run(
        [COMMAND, "up", "--model", str(model), "--detach", "--json", "--state-dir", str(state_dir)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["field"]) == ("INVALID_ARGUMENT", "model")
    assert "model.safetensors" in error["message"]
    assert read_state(state_dir) is None
