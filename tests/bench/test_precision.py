"""The precision benchmark measures divergence from fp32, and its figures mean what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.bench import precision


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_every_choice_gets_a_row_and_fp32_is_exact(tiny_llama_dir: Path) -> None:
    rows = {(row.precision, row.kv_dtype): row for row in precision.measure(tiny_llama_dir, 100)}
    assert len(rows) == 6
    exact = rows["fp32", "fp32"]
    assert (exact.positions, exact.kl_mean, exact.agreement) == (100, 0.0, 1.0)
    assert 0 < rows["fp32", "bf16"].kl_mean < rows["fp32", "int8"].kl_mean < 0.01
    assert 0 < rows["int8", "fp32"].kl_mean < 0.05
    for row in rows.values():
        assert row.agreement > 0.8
        assert row.kl_mean <= row.kl_p99
        assert row.perplexity == pytest.approx(exact.perplexity, rel=0.05)


def test_figures_of_known_distributions() -> None:
    exact = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log()
    ours = torch.tensor([[0.25, 0.75], [0.8, 0.2]]).log()
    row = precision.compare("int8", "fp32", [0, 1], ours, exact)
    first = 0.6 * math.log(0.6 / 0.25) + 0.4 * math.log(0.4 / 0.75)
    second = 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    assert row.kl_mean == pytest.approx((first + second) / 2, rel=1e-5)
    assert row.agreement == 0.5
    assert row.perplexity == pytest.approx(4 / 3)


def test_json_output_is_one_object(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precision.main(["--model", str(tiny_llama_dir), "--tokens", "40", "--threads", "1", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [(row["precision"], row["kv_dtype"]) for row in answer["rows"]][:2] == [("fp32", "fp32"), ("fp32", "bf16")]
    assert "precision" not in answer["machine"]
