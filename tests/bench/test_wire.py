"""The wire benchmark: what a quantised context changes, and that it reports it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.bench import wire


def test_quantised_contexts_are_close_and_not_equal(tiny_llama_dir: Path) -> None:
    rows = wire.measure(tiny_llama_dir, context=64)
    assert [row.wire_format for row in rows] == ["int8", "fp8"]
    for row in rows:
        assert row.context_tokens == 64
        assert row.positions > 64
        assert 0 < row.kl_mean < 0.01
        assert row.kl_mean < row.kl_max < 0.5  # random weights: some positions are near a tie
        assert row.same_greedy > 0.9
        assert row.nbytes_ratio == pytest.approx((16 + 4) / (4 * 16))
    assert rows[0].kl_mean < rows[1].kl_mean  # int8 keeps more of a row than e4m3


def test_json_output_is_one_object(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wire.main(["--model", str(tiny_llama_dir), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [row["wire_format"] for row in report["rows"]] == ["int8", "fp8"]
