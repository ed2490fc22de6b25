"""status, top, drain, logs, down, bench, chat, and the start of up: shapes, messages and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.client import Completed
from kvferry.cli.demo import demo_problems, report_lines
from kvferry.cli.main import COMMANDS
from kvferry.cluster.state_file import ClusterState, write_state
from kvferry.core import NotFoundError
from kvferry.proto import admin_pb2, generation_pb2

Run = Callable[..., Any]

RESOLUTION = admin_pb2.Resolution(
    architecture="LlamaForCausalLM",
    backend="NIXL",
    runtime="PYTHON",
    runtime_source="model",
    manager="V2",
    manager_source="model",
    reason="preferred",
    disaggregation="validated",
)
WORKER = admin_pb2.WorkerStatus(
    name="decode-0",
    role="decode",
    state="ready",
    pid=12,
    incarnation="cafe",
    endpoint="127.0.0.1:9",
    resolution=RESOLUTION,
    blocks=admin_pb2.BlockCounts(total=10, free=9, cached=4, pinned=1, quarantined=0),
    requests={"running": 2, "finished": 0},
    cache=admin_pb2.CacheStatistics(prompt_tokens=50, reused_tokens=20),
    tiers=[admin_pb2.TierCounts(tier="disk", total=10, free=9, kept=1)],
    peers=["127.0.0.1:8"],
)


def test_status_json_has_the_documented_shape(router: Any, kvferry: Run) -> None:
    router.workers = [WORKER]
    result = kvferry("status", "--endpoint", router.endpoint, "--json")
    assert result.exit_code == 0
    status = json.loads(result.stdout)
    (worker,) = status["workers"]
    assert {key: worker[key] for key in ("name", "role", "state", "pid", "incarnation")} == {
        "name": "decode-0",
        "role": "decode",
        "state": "ready",
        "pid": 12,
        "incarnation": "cafe",
    }
    assert worker["blocks"] == {"total": 10, "free": 9, "cached": 4, "pinned": 1, "quarantined": 0}
    assert worker["requests"] == {"running": 2, "finished": 0}
    assert (worker["cache"]["prompt_tokens"], worker["cache"]["reused_tokens"]) == (50, 20)
    assert worker["tiers"] == [{"tier": "disk", "total": 10, "free": 9, "kept": 1, "parked": 0}]
    assert (worker["resolution"]["runtime"], worker["resolution"]["manager_source"]) == ("PYTHON", "model")
    assert status["router"]["requests"] == {"finished": 3}


@pytest.mark.parametrize("command", [["status"], ["top", "--count", "2", "--interval", "0.1"]])
def test_status_for_people_shows_the_pair_and_why(router: Any, kvferry: Run, command: list[str]) -> None:
    router.workers = [WORKER]
    result = kvferry(*command, "--endpoint", router.endpoint)
    assert result.exit_code == 0
    for text in ("decode-0", "NIXL/PYTHON", "V2", "9/10", "running 2", "preferred"):
        assert text in result.stdout


def test_facts_keep_their_lines_in_a_pipe(router: Any, kvferry: Run) -> None:
    reason = "because " * 60
    worker = admin_pb2.WorkerStatus(name="decode-0", role="decode", resolution=RESOLUTION)
    worker.resolution.reason = reason
    router.workers = [worker]
    for command in (["status"], ["top"]):
        result = kvferry(*command, "--endpoint", router.endpoint)
        assert result.exit_code == 0
        assert f"decode-0 (decode, by model/model): {reason.strip()}" in result.stdout
    counted = kvferry("top", "--count", "2", "--interval", "0.1", "--endpoint", router.endpoint)
    assert counted.stdout.count("serves tiny") == 2


def test_commands_say_that_the_cluster_has_ended(tmp_path: Path, kvferry: Run) -> None:
    state = ClusterState("kvf-of-a-test", "tiny", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", 4, None, ("router",))
    write_state(tmp_path, state)
    for command in (["status"], ["generate", "--prompt", "a"], ["drain", "decode-0"]):
        result = kvferry(*command, "--state-dir", str(tmp_path), "--json")
        assert result.exit_code == 2
        error = json.loads(result.stdout)["error"]
        assert (error["code"], error["field"]) == ("UNAVAILABLE", "state_dir")
        assert "has ended" in error["message"]


def test_drain(router: Any, kvferry: Run) -> None:
    result = kvferry("drain", "decode-0", "--endpoint", router.endpoint, "--json")
    assert json.loads(result.stdout) == {"worker": "decode-0", "state": "draining"}
    assert router.drained == ["decode-0"]


def test_drain_of_an_unknown_worker(router: Any, kvferry: Run) -> None:
    router.error = NotFoundError("no worker 'x' is here; there are: decode-0", field="worker")
    result = kvferry("drain", "x", "--endpoint", router.endpoint, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "NOT_FOUND"


def test_logs_print_the_end_and_name_what_there_is(tmp_path: Path, kvferry: Run) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "decode-0.log").write_text("one\ntwo\nthree\n")
    assert kvferry("logs", "decode-0", "-n", "2", "--state-dir", str(tmp_path)).stdout == "two\nthree\n"
    result = kvferry("logs", "../decode-0", "--state-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "there are: decode-0" in result.stderr


def test_down_without_a_cluster_is_fine(tmp_path: Path, kvferry: Run) -> None:
    result = kvferry("down", "--state-dir", str(tmp_path), "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"cluster_id": None, "stopped": False})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--backend", "UCX", "--runtime", "PYTHON"], "transceiver.runtime"),
        (["--engine.max_batch", "0"], "engine.max_batch"),
        (["--engine.max_bach", "1"], "engine.max_bach"),
        (["--prefill", "0"], "prefill.count"),
        (["--model", "/nonexistent"], "model"),
        (["-c", "/nonexistent.yaml"], "config"),
    ],
)
def test_up_refuses_before_anything_starts(tmp_path: Path, kvferry: Run, arguments: list[str], field: str) -> None:
    result = kvferry("up", "--state-dir", str(tmp_path / "state"), "--json", *arguments)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["field"] == field
    assert not (tmp_path / "state").exists()


def test_chat_keeps_the_conversation(router: Any, kvferry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "and now?", ""])
    monkeypatch.setattr("kvferry.cli.chat._read_line", lambda: next(lines))
    router.replies = [
        generation_pb2.GenerateResponse(text="hi", finish_reason=generation_pb2.FINISH_REASON_STOP),
    ]
    result = kvferry("chat", "--endpoint", router.endpoint)
    assert result.exit_code == 0
    assert result.stdout == "hi\nhi\n"
    second = [(message.role, message.content) for message in router.requests[1].chat.messages]
    assert second == [("user", "hello"), ("assistant", "hi"), ("user", "and now?")]


def test_an_unknown_benchmark_lists_the_known(kvferry: Run) -> None:
    result = kvferry("bench", "flor")
    assert result.exit_code == 2
    assert "did you mean floor" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_loads_and_explains_itself(kvferry: Run, command: str) -> None:
    result = kvferry(command, "--help")
    assert result.exit_code == 0
    assert command in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvferry.cli.main import build_app\n"
        "for name in (None, 'generate', 'status', 'down', 'logs', 'resolve', 'up'): build_app(name)\n"
        "assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_the_demo_fails_unless_everything_was_shown() -> None:
    completed = Completed(text="Paris.", route={"transferred_bytes": 9, "prefill": "p", "decode": "d"})
    lines = ["resolved worker=p role=prefill x", "resolved worker=d role=decode x"]
    assert demo_problems(completed, lines, []) == []
    assert len(demo_problems(completed, lines[:1], [])) == 1
    assert len(demo_problems(completed, lines, ["ray::Worker"])) == 1
    assert len(demo_problems(Completed(text="London"), [], [])) == 4
    assert report_lines(completed)[0] == "route    p -> d"
