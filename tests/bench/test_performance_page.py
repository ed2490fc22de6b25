"""The page's tables are those of the measured files beside it, and nothing else is on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench import performance_page
from kvferry.bench.bounds import Bounds, ModelSize
from kvferry.bench.compare import WORKLOADS, Samples, rows_of
from kvferry.bench.interference import Outcome, judged, row_of
from kvferry.bench.load import Call, Window
from kvferry.bench.performance_page import BEGIN, END, made_part
from kvferry.bench.serve import rows_of as serve_rows_of

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"


def write(path: Path, rows: list[Any], **machine: Any) -> None:
    facts = {"processor": "Some CPU", "torch": "2", **machine}
    left_out = [{"system": "vllm-cpu", "reason": "vllm-cpu has died; its log ends with: secrets"}]
    report = {"machine": facts, "rows": [asdict(row) for row in rows], "left_out": left_out}
    path.write_text(json.dumps(report), encoding="utf-8")


def window() -> Window:
    call = Call(0.0, [0.1 * number for number in range(1, 50)], tokens=49, finished=True)
    return Window(0.0, 5.0, [call])


def test_the_page_holds_what_was_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert made_part(PAGE.parent / "measured") in page


def test_nothing_measured_gives_no_section(tmp_path: Path) -> None:
    assert made_part(tmp_path) == f"{BEGIN}\n\n{END}"
    write(tmp_path / "serve.json", [])
    assert made_part(tmp_path) == f"{BEGIN}\n\n{END}"


def test_every_report_becomes_a_table(tmp_path: Path) -> None:
    samples = {"kvferry": Samples([0.1, 0.1], [1, 2]), "llama.cpp": Samples([0.2, 0.2], [1, 2])}
    rows = rows_of({load.name: samples for load in WORKLOADS}, "fp32", 2, ModelSize(1, 1, 1), Bounds(9.5, 70.0), 4)
    write(tmp_path / "compare.json", rows, **{"bounds, 2 threads": {"read_gbytes_per_s": 9.5, "fp32_gflops": 70.0}})
    serve = serve_rows_of({("kvferry 1+1", "http"): [window()], ("llama-server", "http"): [window()]}, "fp32", 8)
    write(tmp_path / "serve.json", serve)
    outcome = Outcome(window(), window(), ())
    pair, other = row_of("kvferry 1+1", "fp32", None, outcome), row_of("llama-server", "fp32", 64, outcome)
    write(tmp_path / "interference.json", judged([pair, other]), every_s=3.0)
    (tmp_path / "serve.png").write_bytes(b"png")
    part = made_part(tmp_path)
    assert "| workload | kvferry | llama.cpp |\n|---|---|---|" in part
    assert "| decode, batch 16 | 160.0 (160.0 to 160.0), 0% of the bound | 80.0 (80.0 to 80.0), **2.00x** |" in part
    assert "fp32, 2 threads (reads 9.5 GB/s, multiplies 70 GFLOP/s in fp32), tokens/s:" in part
    assert "| llama-server | http | 9.8 (9.8 to 9.8) | 100 / 100 ms | 100 / 100 ms | 0 of 1 | 1.00x, 1.00x |" in part
    assert "| llama-server (best of those that share cores) | 64 | 100 / " in part
    assert "![serve](measured/serve.png)" in part
    assert "measured/compare.png" not in part
    assert "Left out: vllm-cpu: vllm-cpu has died." in part
    assert "secrets" not in part


def test_the_command_rewrites_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert performance_page.main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\n{END}\nafter\n"
    assert performance_page.main([]) == 2
    assert "usage" in capsys.readouterr().err
