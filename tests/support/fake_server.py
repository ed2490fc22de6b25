"""`fake_completions` as a system of the serving benchmarks: a real process on a port of its own."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_completions

from kvferry.bench import servers
from kvferry.bench.child import Child
from kvferry.bench.peers.home import PeersHome
from kvferry.bench.servers import Server, ServeShape, ServeSystem


def system(name: str, fault: str = "") -> ServeSystem:
    @contextlib.contextmanager
    def start(shape: ServeShape, home: PeersHome, logs: Path) -> Iterator[Server]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [sys.executable, str(Path(fake_completions.__file__)), "--port", str(port), "--fault", fault]
        with Child(name, words, {}, shape.cores, logs / f"{name}.log") as child:
            server = Server(name, f"http://127.0.0.1:{port}", "bench", (child,))
            servers._await_http(server, "/health")
            yield server

    return ServeSystem(("fp32",), start)
