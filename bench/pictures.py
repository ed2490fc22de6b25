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
    """Writes a PNG. Raises ConfigError when there is nothing to draw, or matplotlib is not installed."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.values))
    if not names:
        raise ConfigError("nothing was measured")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install 'kvferry[bench]'") from None
    columns = min(len(panels), 2 if len(panels) % 2 == 0 else 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.8 * columns, 4.0 * rows), layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        width = 0.8 / len(names)
        for place_in_group, name in enumerate(names):
            values = panel.values.get(name, ())
            drawn = [(place, value) for place, value in enumerate(values) if value is not None]
            places = [place + (place_in_group - (len(names) - 1) / 2) * width for place, _ in drawn]
            bars = axes.bar(places, [value for _, value in drawn], width, label=name, color=f"C{place_in_group}")
            axes.bar_label(bars, fmt="%.3g", fontsize=6)
        axes.set_xticks(range(len(panel.groups)), panel.groups, fontsize=7)
        axes.set_ylabel(panel.unit)
        axes.set_title(panel.title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
