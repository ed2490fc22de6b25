"""A router and workers as plain processes, without Ray: what the fault tests stop, kill and restart."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from hatchery import hatchery

from kvferry.cli.client import Completed, GenerationClient, token_request
from kvferry.cluster.admin_client import AdminClient
from kvferry.core import SamplingParams, UnavailableError
from kvferry.proto import admin_pb2, worker_pb2, worker_pb2_grpc

START_S = 60.0
PATIENCE_S = 30.0
POLL_S = 0.03

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

Settings = dict[str, Any]


class ServerProcess:
    """One process of `kvferry.cluster.standalone`. facts: what it said when it was ready."""

    def __init__(self, arguments: Sequence[str], log: Path, script: Path | None = None) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}
        self.arguments, self.log, self.script = list(arguments), log, script
        with log.open("ab") as errors:
            program = script or "kvferry.cluster.standalone"
            self._process = hatchery().hatch(program, arguments, environ, errors)
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def await_ready(self, deadline: float) -> dict[str, Any]:
        """Blocks until it serves. Fails with the end of its log otherwise."""
        if self.facts:
            return self.facts
        facts = self._hear(deadline)
        assert "pid" in facts, f"{self.arguments}: {facts}\n{self.log.read_text()[-3000:]}"
        self.facts = facts
        return facts

    def _hear(self, deadline: float) -> dict[str, Any]:
        """The next line of JSON the process prints; empty when it ends, or says nothing in time."""
        stdout = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = stdout.readline()
                if not line:
                    break
                if line.startswith("{"):  # UCX may print warnings of its own
                    heard: dict[str, Any] = json.loads(line)
                    return heard
        return {}

    def tell(self, do: str, **arguments: Any) -> None:
        """A command for `faulty_worker`; returns when it is in force."""
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        assert "obeyed" in self._hear(time.monotonic() + PATIENCE_S), f"{self.arguments} does not obey {do}"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self._process.wait(timeout_s)

    def end(self) -> None:
        """SIGTERM, then SIGKILL; also for a stopped process."""
        if self.alive:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                self.wait(8)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                self.wait(8)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@dataclass(slots=True)
class PlainCluster:
    """Owns its processes; `close` ends them. settings: dotted key -> value, for every process. start_s: what they get
    to start."""

    model_dir: Path
    work_dir: Path
    settings: Settings = field(default_factory=dict)
    faulty: frozenset[str] = frozenset()
    start_s: float = START_S
    servers: dict[str, ServerProcess] = field(default_factory=dict)
    grpc: str = ""
    http: str = ""

    def start(self, prefill: int, decode: int) -> None:
        self.spawn_router()
        names = [f"prefill-{n}" for n in range(prefill)] + [f"decode-{n}" for n in range(decode)]
        for name in names:
            self.spawn_worker(name)
        self.await_workers(names)

    def spawn_router(self) -> None:
        """Starts the router, at its former address if it had one; returns when it serves."""
        ports = []
        for flag, address in (("--grpc-port", self.grpc), ("--http-port", self.http)):
            ports += [flag, address.rpartition(":")[2] or "0"]
        server = self._spawn("router", ["router", *ports])
        facts = server.await_ready(time.monotonic() + self.start_s)
        self.grpc, self.http = facts["grpc"], facts["http"]

    def spawn_worker(self, name: str, port: int = 0) -> ServerProcess:
        """Starts a worker and returns at once."""
        role = name.partition("-")[0]
        return self._spawn(name, [role, name, "--router", self.grpc, "--port", str(port)])

    def await_workers(self, names: Sequence[str]) -> None:
        deadline = time.monotonic() + self.start_s
        for name in names:
            self.servers[name].await_ready(deadline)
        problem: str | None = "the router does not answer"
        with AdminClient(self.grpc) as admin:
            while problem is not None:
                assert time.monotonic() < deadline, problem
                time.sleep(POLL_S)
                with contextlib.suppress(UnavailableError):
                    problem = admin.not_ready(names)

    def _spawn(self, name: str, arguments: list[str]) -> ServerProcess:
        script = Path(__file__).with_name("faulty_worker.py") if name in self.faulty else None
        flags = [part for key, value in self.settings.items() for part in (f"--{key}", str(value))]
        if name in self.servers:
            self.servers[name].end()
        server = ServerProcess(
            [*arguments, "--model", str(self.model_dir), *flags], self.work_dir / f"{name}.log", script
        )
        self.servers[name] = server
        return server

    def close(self) -> None:
        for server in self.servers.values():
            if server.alive:
                server.signal(signal.SIGCONT)
                server.signal(signal.SIGTERM)
        for server in self.servers.values():
            server.end()

    # -- faults -------------------------------------------------------------------------------------------

    def signal(self, name: str, number: signal.Signals) -> None:
        self.servers[name].signal(number)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """The process stands still inside the block."""
        self.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(name, signal.SIGCONT)

    def inject(
        self, name: str, fault: str, target: str = "operation", *, skip: int = 0, count: int = 1, delay_s: float = 0.0
    ) -> None:
        """The next operations (or notifications) of a faulty worker's agent; see `FaultyAgent.inject`."""
        self.servers[name].tell(fault, target=target, skip=skip, count=count, delay_s=delay_s)

    # -- requests -----------------------------------------------------------------------------------------

    def client(self, timeout_s: float = PATIENCE_S) -> GenerationClient:
        return GenerationClient(self.grpc, timeout_s)

    def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams = GREEDY) -> Completed:
        """Raises the KVFerryError of a request that was refused or failed."""
        with self.client() as client:
            completed = Completed()
            for message in client.stream(token_request(prompt_ids, sampling)):
                completed.add(message)
            return completed

    def complete_all(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY) -> list[Completed]:
        """All at once, each on a connection of its own."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, sampling), prompts))

    # -- what the workers say -----------------------------------------------------------------------------

    def router_status(self) -> admin_pb2.StatusResponse:
        with AdminClient(self.grpc) as admin:
            return admin.status()

    def describe(self, name: str) -> admin_pb2.WorkerStatus:
        """Asked of the worker itself: the router's view may be a second old."""
        with grpc.insecure_channel(self.servers[name].facts["endpoint"]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)

    def workers(self) -> list[str]:
        return [name for name, server in self.servers.items() if name != "router" and server.alive]

    def eventually(self, holds: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> float:
        """Polls until `holds()`; fails naming `what`. Returns how long it took."""
        started = time.monotonic()
        while not holds():
            waited = time.monotonic() - started
            assert waited < within_s, f"{what}, not within {within_s:g} s:\n{self.picture()}"
            time.sleep(POLL_S)
        return time.monotonic() - started

    def at_baseline(self, *names: str) -> bool:
        """Whether every block of these workers (default: all) is free again, and nothing runs there."""
        return all(_at_rest(self.describe(name)) for name in names or self.workers())

    def assert_baseline(self, *names: str, within_s: float = PATIENCE_S) -> float:
        return self.eventually(lambda: self.at_baseline(*names), f"{names or 'all'} not back at baseline", within_s)

    def picture(self) -> str:
        """For failures: blocks and requests of every worker that answers."""
        lines = []
        for name in self.workers():
            try:
                status = self.describe(name)
            except grpc.RpcError as error:
                lines.append(f"{name}: {error}")
                continue
            blocks = status.blocks
            counts = {key: getattr(blocks, key) for key in ("total", "free", "cached", "pinned", "quarantined")}
            lines.append(f"{name}: {status.state} {counts} {dict(status.requests)}")
        return "\n".join(lines)


@contextlib.contextmanager
def running_pair(model_dir: Path, work_dir: Path, settings: Settings) -> Iterator[PlainCluster]:
    """One prefill and one decode worker of a thread each, ended with the block."""
    cluster = PlainCluster(model_dir, work_dir, {"engine.threads": 1, "state_dir": work_dir, **settings})
    try:
        cluster.start(prefill=1, decode=1)
        yield cluster
    finally:
        cluster.close()


LIVE = frozenset({"queued", "running", "held", "reserved", "loading", "prefilling", "suspended"})


def _at_rest(status: admin_pb2.WorkerStatus) -> bool:
    blocks = status.blocks
    free = blocks.free == blocks.total > 0 and blocks.pinned == blocks.quarantined == 0
    return free and not any(status.requests.get(state, 0) for state in LIVE)
