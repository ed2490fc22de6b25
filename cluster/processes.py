"""Finding and stopping the processes of one cluster, and no others.

Everything a cluster starts inherits an environment variable with its id, so what belongs to it can be told from
``/proc`` for certain, also after its parent died, and also from another shell.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.core import ConfigError, UnavailableError

CLUSTER_VARIABLE = "KVFERRY_CLUSTER_ID"
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    pid: int
    command: str


def cluster_processes(cluster_id: str) -> list[ProcessInfo]:
    """Living processes that were started with this cluster's id in their environment. Zombies do not count."""
    mark = f"{CLUSTER_VARIABLE}={cluster_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(ProcessInfo(int(entry.name), command))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def stop_processes(cluster_id: str, first: int | None, grace_s: float = 10.0) -> list[ProcessInfo]:
    """SIGTERM to `first` (the Ray head, which stops its children in order), then whatever it takes for the rest.

    Blocks until none is left, at most about `grace_s` + 5 s. Returns those that could not be stopped.
    """
    alive = cluster_processes(cluster_id)
    if first is not None and any(process.pid == first for process in alive):
        _signal(first, signal.SIGTERM)
    else:
        _signal_all(alive, signal.SIGTERM)
    if not wait_until(lambda: not cluster_processes(cluster_id), grace_s):
        _signal_all(cluster_processes(cluster_id), signal.SIGKILL)
        wait_until(lambda: not cluster_processes(cluster_id), 5.0)
    return cluster_processes(cluster_id)


def wait_until(holds: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Polls until `holds()`; False when it did not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def free_port(host: str, wanted: int, key: str) -> int:
    """`wanted` if it can be bound now, or any free port for 0. Raises ConfigError naming a taken port.

    Chosen before the process that serves it starts, so that a restarted one comes back at the same address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"{key}: port {wanted} of {host} cannot be bound ({reason}); choose another, or 0 for any free one",
                field=key,
            ) from None
        port: int = probe.getsockname()[1]
        return port


def check_reachable(address: str, key: str, timeout_s: float = 3.0) -> None:
    """Raises UnavailableError when nobody accepts connections at host:port, ConfigError when it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(f"{key} must be HOST:PORT, got {address!r}", field=key)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"{key}: nobody answers at {address}: {error}", field=key) from None


def _signal_all(processes: list[ProcessInfo], number: signal.Signals) -> None:
    for process in processes:
        _signal(process.pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
