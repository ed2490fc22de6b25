"""Pictures beside the tables. Needs the `bench` extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.core import ConfigError


@dataclass(frozen=True, slots=True)
class Bars:
    """One panel: a group of bars for each of `groups`, in it one bar for each series. values: series -> one value per
    group, None where there is none. The series' order is the same in every panel, and so are their colours."""

    title: str
    unit: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]


def draw_bars(path: Path, title: str, panels: Sequence[Bars]) -> None:
    """Writes a PNG. Raises ConfigError when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install 'kvferry[bench]', or leave --out out") from None
    figure = Figure(figsize=(max(5.0, 5.2 * len(panels)), 4.2), layout="constrained")
    figure.suptitle(title)
    names = list(dict.fromkeys(name for panel in panels for name in panel.values))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            values = panel.values.get(name, ())
            drawn = [(place, value) for place, value in enumerate(values) if value is not None]
            places = [place + (number - (len(names) - 1) / 2) * width for place, _ in drawn]
            bars = axes.bar(places, [value for _, value in drawn], width, label=name, color=f"C{number}")
            axes.bar_label(bars, fmt="%.3g", fontsize=6)
        axes.set_xticks(range(len(panel.groups)), panel.groups, fontsize=7)
        axes.set_ylabel(panel.unit)
        axes.set_title(panel.title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
