"""Only what carries the cluster's id is found and stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvferry.cluster.processes import (
    CLUSTER_VARIABLE,
    check_reachable,
    cluster_processes,
    free_port,
    stop_processes,
    wait_until,
)
from kvferry.core import ConfigError, UnavailableError

Start = Callable[..., "subprocess.Popen[bytes]"]
_SLEEP = "import time; print('up', flush=True); time.sleep(60)"
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _SLEEP


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run(cluster_id: str, code: str = _SLEEP) -> subprocess.Popen[bytes]:
        environ = {**os.environ, CLUSTER_VARIABLE: cluster_id}
        process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_only_this_clusters_processes_are_stopped(start: Start) -> None:
    ours, other = start("kvf-test-a"), start("kvf-test-ab")
    assert [process.pid for process in cluster_processes("kvf-test-a")] == [ours.pid]
    assert stop_processes("kvf-test-a", None) == []
    assert ours.wait(5) != 0
    assert other.poll() is None


def test_what_ignores_sigterm_is_killed(start: Start) -> None:
    stubborn = start("kvf-test-b", _STUBBORN)
    assert stop_processes("kvf-test-b", stubborn.pid, grace_s=0.2) == []
    assert stubborn.wait(5) == -9


def test_nothing_to_stop_is_fine() -> None:
    assert stop_processes("kvf-test-nobody", first=1) == []


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"router.grpc_port: port {port}") as caught:
            free_port("127.0.0.1", port, "router.grpc_port")
    assert caught.value.field == "router.grpc_port"


def test_port_zero_is_any_free_one() -> None:
    port = free_port("127.0.0.1", 0, "router.http_port")
    assert free_port("127.0.0.1", port, "router.http_port") == port


def test_wait_until_gives_up() -> None:
    assert wait_until(lambda: True, 0.0)
    assert not wait_until(lambda: False, 0.05, poll_s=0.01)


@pytest.mark.parametrize("address", ["somewhere", "127.0.0.1", "ray://127.0.0.1:10001", ":1", ""])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="ray_address must be HOST:PORT"):
        check_reachable(address, "ray_address")


def test_an_address_where_nobody_answers() -> None:
    with pytest.raises(UnavailableError, match=r"nobody answers at 127\.0\.0\.1:1") as caught:
        check_reachable("127.0.0.1:1", "ray_address")
    assert caught.value.field == "ray_address"
