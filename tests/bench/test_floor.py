"""The floor benchmark compares like with like and reports what it measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.bench import floor


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_both_sides_choose_the_same_tokens(tiny_llama_dir: Path) -> None:
    rows = floor.measure(tiny_llama_dir, rounds=2, threads=1)
    assert [row.workload for row in rows] == ["prefill 512", "decode, batch 1", "decode, batch 8", "decode, batch 16"]
    for row in rows:
        assert row.agreement >= 0.98
        assert row.ratio == pytest.approx(row.transformers_ms / row.kvferry_ms)
        assert row.kvferry_spread_ms[0] <= row.kvferry_ms <= row.kvferry_spread_ms[1]
    batch16 = rows[-1]
    assert batch16.kvferry_tokens_per_s == pytest.approx(16e3 / batch16.kvferry_ms)


def test_json_output_is_one_object(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floor.main(["--model", str(tiny_llama_dir), "--rounds", "1", "--threads", "1", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["machine"]["threads"] == 1
    assert [row["target"] for row in answer["rows"]] == [1.0, 1.5, 1.5, None]


def test_a_missed_target_stands_out() -> None:
    row = floor.FloorRow("w", 20.0, (19.0, 21.0), 50.0, 10.0, (9.0, 11.0), 100.0, 0.5, 1.0, 1.0)
    table = floor.as_table([row])
    assert list(table.columns[3].cells) == ["[red]0.50x[/red]"]
