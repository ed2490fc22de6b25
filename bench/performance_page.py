"""The tables of docs/performance.md, from `measured/*.json` beside it.

``python -P -m kvferry.bench.performance_page docs/performance.md`` rewrites the page.

A comparison that has no file there has no section: nothing on the page was not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.core.generated_page import replace_part, rewrite_page

BEGIN, END = "<!-- beside others: generated -->", "<!-- beside others: end -->"

Facts = dict[str, Any]


def made_part(measured: Path) -> str:
    """The generated part, markers included."""
    sections = []
    for name, section in SECTIONS.items():
        path = measured / f"{name}.json"
        report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
        if report["rows"]:
            sections += [*section(report), ""]
            if path.with_suffix(".png").is_file():
                sections += [f"![{name}](measured/{name}.png)", ""]
    return "\n".join([BEGIN, "", *sections, END])


def _compare(report: Facts) -> list[str]:
    lines = ["### The engine", "", _on(report, "kvferry bench compare")]
    rows = report["rows"]
    for precision, threads in dict.fromkeys((row["precision"], row["threads"]) for row in rows):
        of_table = [row for row in rows if (row["precision"], row["threads"]) == (precision, threads)]
        bounds = report["machine"][f"bounds, {threads} threads"]
        systems = list(dict.fromkeys(row["system"] for row in of_table))
        lines += [
            "",
            f"{precision}, {threads} thread{'s' if threads > 1 else ''} (reads {bounds['read_gbytes_per_s']:.1f} GB/s, "
            f"multiplies {bounds['fp32_gflops']:.0f} GFLOP/s in fp32), tokens/s:",
            "",
            *_header(["workload", *systems]),
        ]
        for workload in dict.fromkeys(row["workload"] for row in of_table):
            cells = {row["system"]: _speed(row) for row in of_table if row["workload"] == workload}
            lines.append(_line([workload, *(cells.get(system, "-") for system in systems)]))
    return [*lines, *_left_out(report)]


def _speed(row: Facts) -> str:
    speed = row["prefill_tokens_per_s"] or row["decode_tokens_per_s"]
    low, high = row["spread"]
    text = f"{speed:.1f} ({low:.1f} to {high:.1f})"
    if row["target"] is not None and row["ratio"] is not None:
        return f"{text}, **{row['ratio']:.2f}x**"
    return text if row["bound_fraction"] is None else f"{text}, {row['bound_fraction']:.0%} of the bound"


def _serve(report: Facts) -> list[str]:
    rows = report["rows"]
    lines = [
        "### Serving",
        "",
        _on(report, "kvferry bench serve") + f" {rows[0]['clients']} clients, {rows[0]['workload']}, closed loop:",
        "",
        *_header(
            [
                "system",
                "transport",
                "output tokens/s",
                "TTFT p50 / p99",
                "ITL p50 / p99",
                "failed",
                "kvferry: tokens/s, ITL p50",
            ]
        ),
    ]
    for row in rows:
        ours = row["system"].startswith("kvferry")
        lines.append(
            _line(
                [
                    row["system"],
                    row["transport"],
                    f"{row['output_tokens_per_s']:.1f} ({row['spread'][0]:.1f} to {row['spread'][1]:.1f})",
                    _pair_ms(row["ttft_ms_p50"], row["ttft_ms_p99"]),
                    _pair_ms(row["itl_ms_p50"], row["itl_ms_p99"]),
                    f"{row['failed']} of {row['requests']}",
                    "" if ours or row["ratio"] is None else f"{row['ratio']:.2f}x, {row['itl_ratio']:.2f}x",
                ]
            )
        )
    return [*lines, *_left_out(report)]


def _interference(report: Facts) -> list[str]:
    lines = [
        "### Interference",
        "",
        _on(report, "kvferry bench interference")
        + f" Four streams, and a prompt of 2,000 tokens every {report['machine']['every_s']:g} seconds:",
        "",
        *_header(
            [
                "system",
                "chunk",
                "ITL p50 / p99",
                "without prompts",
                "streams, tokens/s",
                "all tokens/s",
                "long prompts done",
            ]
        ),
    ]
    for row in report["rows"]:
        ratio = "" if row["ratio"] in (None, 1.0) else f", **{row['ratio']:.1f}x**"
        lines.append(
            _line(
                [
                    row["system"] + (" (best of those that share cores)" if row["best"] else ""),
                    "-" if row["chunk"] is None else str(row["chunk"]),
                    _pair_ms(row["itl_ms_p50"], row["itl_ms_p99"]) + ratio,
                    _pair_ms(row["itl_alone_ms_p50"], row["itl_alone_ms_p99"]),
                    f"{row['stream_tokens_per_s']:.1f}",
                    f"{row['total_tokens_per_s']:.0f}",
                    f"{row['long_done']} of {row['long_sent']}",
                ]
            )
        )
    return [*lines, *_left_out(report)]


SECTIONS: dict[str, Callable[[Facts], list[str]]] = {
    "compare": _compare,
    "serve": _serve,
    "interference": _interference,
}


def _on(report: Facts, command: str) -> str:
    machine = report["machine"]
    return f"`{command}` on {machine['processor']}, torch {machine['torch']}."


def _left_out(report: Facts) -> list[str]:
    """Without the end of a log that a reason may quote."""
    return [f"\nLeft out: {entry['system']}: {entry['reason'].partition(';')[0]}." for entry in report["left_out"]]


def _pair_ms(median: float | None, high: float | None) -> str:
    return "-" if median is None or high is None else f"{median:.0f} / {high:.0f} ms"


def _header(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    def made_anew(page: str) -> str:
        return replace_part(page, BEGIN, END, made_part(Path(arguments[0]).parent / "measured"))

    return rewrite_page("kvferry.bench.performance_page", arguments, made_anew, sys.stderr.write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
