"""The interference benchmark: which waits count, what was done meanwhile, and that everything ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import fake_server
import pytest

from kvferry.bench import interference
from kvferry.bench.interference import LONG_TOKENS, InterferenceRow, Outcome, Plan, interfere, judged, row_of
from kvferry.bench.load import Ask, Call, CallFailedError, Client, Part, Window
from kvferry.bench.servers import ServeSystem
from kvferry.core import Registry


class Words:
    """Stands in for a PromptSource: the right lengths."""

    def take(self, tokens: int) -> list[int]:
        return [7] * tokens


class OneLane(Client):
    """A server that stops all streams while it computes a long prompt."""

    def __init__(self, long_s: float, fails: bool = False) -> None:
        self._lane = asyncio.Lock()
        self._long_s = long_s
        self._fails = fails
        self.running = 0

    async def parts(self, ask: Ask) -> AsyncGenerator[Part, None]:
        self.running += 1
        try:
            if self._fails:
                raise CallFailedError("no room")
            if len(ask.prompt) == LONG_TOKENS:
                async with self._lane:
                    await asyncio.sleep(self._long_s)
            for _ in range(ask.max_tokens):
                async with self._lane:
                    await asyncio.sleep(0.001)
                yield Part(has_tokens=True)
            yield Part(False, len(ask.prompt), ask.max_tokens)
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


async def test_long_prompts_are_seen_in_the_streams_and_everything_ends() -> None:
    client = OneLane(long_s=0.15)
    plan = Plan(alone_s=0.3, seconds=1.0, every_s=0.4)
    outcome = await interfere(client, Words(), plan)  # type: ignore[arg-type]
    assert client.running == 0
    row = row_of("one lane", "fp32", 64, outcome)
    assert (row.long_sent, row.failed) == (3, 0)
    assert 2 <= row.long_done <= 3
    assert row.itl_ms_p99 is not None
    assert row.itl_alone_ms_p50 is not None
    assert row.itl_ms_p99 >= 150 > row.itl_alone_ms_p50
    assert row.long_ttft_ms_p50 is not None
    assert row.long_ttft_ms_p50 >= 150
    assert row.total_tokens_per_s > row.long_done * LONG_TOKENS / 1.3


async def test_failing_streams_are_counted_and_do_not_hang() -> None:
    outcome = await interfere(OneLane(0.0, fails=True), Words(), Plan(0.05, 0.1, 0.1))  # type: ignore[arg-type]
    row = row_of("refuses", "fp32", None, outcome)
    assert row.failed == interference.STREAMS + 1
    assert (row.itl_ms_p50, row.stream_tokens_per_s, row.long_done) == (None, 0.0, 0)


def test_a_stream_that_stands_still_counts_with_its_wait() -> None:
    running = Call(0.0, [0.5, 1.5, 2.0])
    stopped = Call(0.0, [0.5, 1.2])
    crowded = Window(1.0, 4.0, [running, stopped])
    outcome = Outcome(Window(0.0, 1.0, [running, stopped]), crowded, ())
    row = row_of("s", "fp32", None, outcome)
    gaps = sorted([1000.0, 500.0, 2000.0, 700.0, 2800.0])  # the last wait of each is cut off by the window
    assert row.itl_ms_p50 == pytest.approx(gaps[2])
    assert row.stream_tokens_per_s == pytest.approx(1.0)


def rows(**p99: float) -> list[InterferenceRow]:
    names = {"pair": "kvferry 1+1", "aggregated": "kvferry aggregated", "llama": "llama-server"}
    empty = Window(0.0, 1.0, [])
    return [
        replace(row_of(names[key], "fp32", None, Outcome(empty, empty, ())), itl_ms_p99=value)
        for key, value in p99.items()
    ]


def test_the_pair_is_held_against_the_best_of_the_others() -> None:
    pair, aggregated, llama = judged(rows(pair=20.0, aggregated=50.0, llama=90.0))
    assert (pair.ratio, aggregated.ratio, llama.ratio) == (1.0, 2.5, 4.5)
    assert (pair.best, aggregated.best, llama.best) == (False, True, False)
    table = interference.as_table([pair, aggregated, llama])
    assert list(table.columns[-1].cells) == ["1.0x", "[red]2.5x[/red]", "4.5x"]
    (alone,) = judged(rows(llama=90.0))
    assert (alone.ratio, alone.best) == (None, True)


def test_the_command_runs_each_chunk_size_and_leaves_out_what_fails(
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    systems: Registry[ServeSystem] = Registry("server", "systems")
    systems.register("llama-server", fake_server.system("llama-server"))
    systems.register("dead", fake_server.system("dead", fault="dies"))
    systems.register("refuses", fake_server.system("refuses", fault="refuse"))
    monkeypatch.setattr(interference, "SERVERS", systems)
    monkeypatch.setattr(interference, "STREAM_TOKENS", 40)
    started = time.monotonic()
    flags = ["--seconds", "0.6", "--every", "0.2", "--chunks", "16,32", "--out", str(tmp_path)]
    interference.main(["--model", str(tiny_llama_dir), "--systems", "llama-server,dead,refuses", *flags, "--json"])
    assert time.monotonic() - started < 60
    printed = json.loads(capsys.readouterr().out)
    assert [(row["system"], row["chunk"], row["failed"]) for row in printed["rows"]] == [
        ("llama-server", 16, 0),
        ("llama-server", 32, 0),
    ]
    assert all(row["itl_ms_p99"] >= 5.0 and row["long_sent"] == 3 for row in printed["rows"])
    reasons = {entry["system"]: entry["reason"] for entry in printed["left_out"]}
    assert set(reasons) == {f"{name}, chunks of {chunk}" for name in ("dead", "refuses") for chunk in (16, 32)}
    assert "no such model" in reasons["dead, chunks of 16"]
    assert "HTTP 503: no room" in reasons["refuses, chunks of 32"]
    assert json.loads((tmp_path / "interference.json").read_text()) == printed
    assert (tmp_path / "interference.png").read_bytes().startswith(b"\x89PNG")
