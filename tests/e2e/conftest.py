"""Real clusters: Ray, worker processes, SmolLM2. Started by the command, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.client import Completed, GenerationClient, token_request
from kvferry.cluster.processes import cluster_processes
from kvferry.core import SamplingParams

COMMAND = [str(Path(sys.executable).parent / "kvferry")]
PATIENCE_S = 60.0
ANSWER_S = 180.0
START_S = 240.0

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster. facts: what `kvferry up --json` printed."""

    facts: dict[str, Any]
    state_dir: Path

    def run(self, *arguments: str, check: bool = True) -> tuple[int, Any]:
        """One command with --json against this cluster: its exit code and what it printed."""
        done = subprocess.run(
            [*COMMAND, *arguments, "--state-dir", str(self.state_dir), "--json"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    def status(self) -> dict[str, dict[str, Any]]:
        """Workers by name."""
        return {worker["name"]: worker for worker in self.run("status")[1]["workers"]}

    def client(self) -> GenerationClient:
        return GenerationClient(self.facts["grpc"], ANSWER_S)

    def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Completed:
        """on_tokens(count): called after each message with the number of tokens received so far."""
        with self.client() as client:
            completed = Completed()
            for message in client.stream(token_request(prompt_ids, sampling)):
                completed.add(message)
                on_tokens(len(completed.token_ids))
            return completed

    def complete_all(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY) -> list[Completed]:
        """All at once, each on a connection of its own."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, sampling), prompts))

    def eventually(self, holds: Callable[[dict[str, dict[str, Any]]], bool], what: str) -> dict[str, dict[str, Any]]:
        """Polls the status until `holds(status)`; fails naming `what` and the last status."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = self.status()
            if holds(status):
                return status
            assert time.monotonic() < deadline, f"{what}: {json.dumps(status, indent=1)}"
            time.sleep(0.2)

    def settled(self) -> dict[str, dict[str, Any]]:
        """Waits until every worker is ready, idle, and has all its blocks back."""
        return self.eventually(lambda status: all(map(_idle, status.values())), "blocks do not return to the start")


def _idle(worker: dict[str, Any]) -> bool:
    blocks = worker["blocks"]
    return (
        worker["state"] == "ready"
        and blocks["free"] == blocks["total"] > 0
        and blocks["pinned"] == blocks["quarantined"] == 0
    )


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """start_cluster("--prefill", "2") -> Cluster. Stopped after the module; nothing of it may be left."""
    started: list[Cluster] = []

    def start(*arguments: str) -> Cluster:
        state_dir = tmp_path_factory.mktemp("cluster")
        done = subprocess.run(
            [*COMMAND, "up", "--detach", "--json", "--state-dir", str(state_dir), *arguments],
            capture_output=True,
            text=True,
            timeout=START_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        started.append(Cluster(json.loads(done.stdout), state_dir))
        return started[-1]

    yield start
    for cluster in started:
        cluster.run("down")
        assert cluster_processes(cluster.facts["cluster_id"]) == []


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> Any:
    from kvferry.text import Tokenizer

    return Tokenizer.load(smollm2_dir)


@pytest.fixture(scope="session")
def long_ids(tokenizer: Any) -> list[int]:
    """More than 1,100 tokens of text that does not repeat itself word for word."""
    text = " ".join(
        f"In the year {1500 + 7 * n} the ferry number {n} carried {13 * n + 5} letters across the river."
        for n in range(80)
    )
    ids: list[int] = tokenizer.encode(text)
    assert len(ids) > 1100
    return ids
