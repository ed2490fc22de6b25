"""A Ray cluster of our own on this machine: started as child processes, stopped by their ids.

Never `ray stop`: that ends every Ray process on the machine, other people's too.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.processes import CLUSTER_VARIABLE, free_port, stop_processes
from kvferry.core import UnavailableError

START_TIMEOUT_S = 60.0
# Ray carries no tokens and no KV here: the smallest object store it accepts will do.
OBJECT_STORE_NBYTES = 100_000_000
_TEMP_PREFIX = "kvferry-"
_TOKEN_FILE = "auth_token"

_ENVIRONMENT = {
    # The repository's folders must not be importable by their bare names in workers.
    "PYTHONSAFEPATH": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # SIGTERM stops at once; the default waits 30 s for actors to leave by themselves.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Without it Ray swaps 127.0.0.1 for the address of this machine and listens on all of them.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray would kill a worker when others on this machine use memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray runs workers at niceness 15, behind everything else on the machine: these are the service.
    "RAY_worker_niceness": "0",
    # Each worker here has an environment of its own: processes started in advance would stay unused.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True, slots=True)
class RayHead:
    address: str
    pid: int
    temp_dir: str


def start_ray_head(cluster_id: str, resources: Mapping[str, int]) -> RayHead:
    """Blocks until the head accepts connections. Raises UnavailableError with the end of its output."""
    # Sockets live below it, and their paths must stay short: not in the state directory.
    temp_dir = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir="/tmp"))
    _write_token(temp_dir)
    port = free_port("127.0.0.1", 0, "ray_address")
    output = temp_dir / "head.log"
    with output.open("w") as log:
        process = subprocess.Popen(
            _command(port, temp_dir, resources),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=temp_dir,
            env=_head_environ(os.environ, temp_dir, cluster_id),
            start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
        )
    head = RayHead(f"127.0.0.1:{port}", process.pid, str(temp_dir))
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while not _accepts(port):
            if process.poll() is not None or time.monotonic() > deadline:
                ending = "ended" if process.poll() is not None else f"did not answer within {START_TIMEOUT_S:.0f} s"
                tail = output.read_text(errors="replace")[-2000:]
                raise UnavailableError(f"ray start {ending}:\n{tail}", field="ray_address")
            time.sleep(0.1)
    except BaseException:
        stop_ray_head(cluster_id, head.pid, head.temp_dir)
        raise
    return head


def token_environ(environ: Mapping[str, str], temp_dir: str | Path) -> dict[str, str]:
    """`environ` for a process that may talk to the Ray cluster of `temp_dir`, and no other token in it.

    Without the token anybody with an account on this machine could run code in the cluster.
    """
    kept = {name: value for name, value in environ.items() if name != "RAY_AUTH_TOKEN"}
    return {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Path(temp_dir) / _TOKEN_FILE)}


def stop_ray_head(cluster_id: str, pid: int | None, temp_dir: str | None) -> list[int]:
    """Stops everything of this cluster; returns the pids that would not go."""
    left = stop_processes(cluster_id, pid)
    if pid is not None:
        _reap(pid)
    if temp_dir and Path(temp_dir).name.startswith(_TEMP_PREFIX):
        shutil.rmtree(temp_dir, ignore_errors=True)
    return [process.pid for process in left]


def _write_token(temp_dir: Path) -> None:
    """A secret of this cluster alone, readable by its owner. It goes with the directory."""
    descriptor = os.open(temp_dir / _TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def _head_environ(environ: Mapping[str, str], temp_dir: Path, cluster_id: str) -> dict[str, str]:
    return {**token_environ(environ, temp_dir), **_ENVIRONMENT, CLUSTER_VARIABLE: cluster_id}


def _command(port: int, temp_dir: Path, resources: Mapping[str, int]) -> list[str]:
    return [
        sys.executable,
        *("-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        f"--port={port}",
        # Cannot be switched off; a free port keeps two clusters on one machine apart.
        f"--ray-client-server-port={free_port('127.0.0.1', 0, 'ray_address')}",
        "--node-ip-address=127.0.0.1",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        f"--temp-dir={temp_dir}",
        f"--object-store-memory={OBJECT_STORE_NBYTES}",
        f"--num-cpus={max(1, len(os.sched_getaffinity(0)))}",
        "--resources",
        json.dumps(dict(resources)),
    ]


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return True
    except OSError:
        return False


def _reap(pid: int) -> None:
    """When the head is our own child: so that it leaves no zombie."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
