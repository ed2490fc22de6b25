"""The scale benchmark's grid, and bounds that follow from what was counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.bench import scale
from kvferry.resolution import read_config


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(scale, "BATCHES", (1, 3))
    monkeypatch.setattr(scale, "CONTEXTS", (16, 40, 5000))
    monkeypatch.setattr(scale, "PROMPTS", (32, 5000))
    monkeypatch.setattr(scale, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(scale, "arithmetic", lambda device, dtype: 1e10)
    yield
    torch.set_num_threads(threads)


WEIGHTS = 3 * (96 * (96 + 2 * 32) + 96 * 96 + 3 * 96 * 160)  # layers of qkv, out, and gate, up, down
KV_TOKEN_NBYTES = 3 * 2 * 2 * 16 * 4


def test_the_grid_and_its_bounds(tiny_llama_dir: Path) -> None:
    rows = scale.measure(tiny_llama_dir, scale.Choice(rounds=2))
    assert [(row.step, row.batch, row.context) for row in rows] == [
        ("decode", 1, 16),
        ("decode", 3, 16),
        ("decode", 1, 40),
        ("decode", 3, 40),
        ("prefill", 1, 32),
    ]
    for row in rows:
        assert 0 < row.best_ms <= row.ms
        assert row.bound_ms is not None
        assert row.fraction == pytest.approx(row.bound_ms / row.ms)
    bounds = [row.bound_ms or 0.0 for row in rows]
    assert bounds[1] - bounds[0] == pytest.approx(2 * 17 * KV_TOKEN_NBYTES / 1e6)
    assert bounds[-1] == pytest.approx(2 * WEIGHTS * 32 / 1e7)
    head = 96 * read_config(tiny_llama_dir)["vocab_size"]
    assert bounds[0] * 1e6 == pytest.approx(17 * KV_TOKEN_NBYTES + 4 * (WEIGHTS + head))


def test_int8_reads_a_quarter_and_has_no_bound_of_arithmetic(tiny_llama_dir: Path) -> None:
    exact, rounded = (
        scale.measure(tiny_llama_dir, scale.Choice(precision, kv, rounds=1))
        for precision, kv in (("fp32", "fp32"), ("int8", "int8"))
    )
    assert rounded[-1].bound_ms is None
    ratio = (rounded[0].bound_ms or 0) / (exact[0].bound_ms or 1)
    assert ratio == pytest.approx(0.266, abs=0.01)


def test_caches_that_are_too_large_are_left_out(tiny_llama_dir: Path) -> None:
    rows = scale.measure(tiny_llama_dir, scale.Choice(rounds=1, most_kv_bytes=17 * KV_TOKEN_NBYTES))
    assert [(row.step, row.batch, row.context) for row in rows] == [("decode", 1, 16), ("prefill", 1, 32)]


def test_json_output_is_one_object(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--model", str(tiny_llama_dir), "--precision", "int8", "--rounds", "1", "--threads", "1", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["machine"]["precision"], answer["machine"]["kv_dtype"]) == ("int8", "fp32")
    assert [row["step"] for row in answer["rows"]] == ["decode"] * 4 + ["prefill"]
