"""What a step costs beside its forward pass: which spans count, and the whole loop on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvferry.bench import step
from kvferry.bench.step import StepRow, as_table


def test_only_whole_steps_count_each_with_the_pause_behind_it() -> None:
    # (start, end, tokens): the second pair is cut by a step in which one sequence had ended.
    spans = [(0.0, 0.010, 2), (0.012, 0.022, 2), (0.025, 0.035, 1), (0.036, 0.046, 2), (0.050, 0.060, 2)]
    row = step._row(spans, 2, "greedy")
    assert (row.batch, row.sampling, row.target_ms) == (2, "greedy", None)
    assert row.step_ms == pytest.approx(13.0)
    assert row.forward_ms == pytest.approx(10.0)
    assert row.outside_ms == pytest.approx(3.0)
    assert row.outside_spread_ms == pytest.approx((2.2, 3.8))


@pytest.mark.parametrize(("batch", "target"), [(1, 2.0), (16, 4.0), (8, None)])
def test_targets_are_by_batch_size(batch: int, target: float | None) -> None:
    assert step._row([(0.0, 0.001, batch), (0.002, 0.003, batch)], batch, "greedy").target_ms == target


def test_what_misses_its_target_is_shown_in_red() -> None:
    rows = [StepRow(16, "greedy", 50.0, 45.0, outside, (1.0, 6.0), 4.0) for outside in (3.9, 4.1)]
    cells = list(as_table(rows).columns[4].cells)
    assert cells == ["3.9 ms (1.0 to 6.0)", "[red]4.1 ms (1.0 to 6.0)[/red]"]


def test_every_batch_runs_greedy_and_sampled(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "DECODE_STEPS", 6)
    monkeypatch.setattr(step, "CONTEXT_TOKENS", 40)
    before = torch.get_num_threads()
    try:
        step.main(["--model", str(tiny_llama_dir), "--threads", "1", "--json"])
    finally:
        torch.set_num_threads(before)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["batch"], row["sampling"]) for row in rows] == [
        (batch, sampling) for batch in (1, 8, 16) for sampling in ("greedy", "sampled")
    ]
    for row in rows:
        assert 0 < row["forward_ms"] < row["step_ms"]
        assert 0 < row["outside_ms"] < row["step_ms"]
