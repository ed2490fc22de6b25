"""The command of a comparison with other systems: the options that all of them have, their output and their files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.bench.figures import Report
from kvferry.bench.flags import names, note, publish
from kvferry.bench.peers.home import DEFAULT_HOME
from kvferry.core import Registry
from kvferry.models import progress_bar, resolve_model


def comparison_parser(name: str, about: str | None, systems: Registry[Any], quick: str) -> argparse.ArgumentParser:
    """With what every comparison takes. quick: what is less then."""
    parser = argparse.ArgumentParser(prog=f"kvferry bench {name}", description=about)
    parser.add_argument("--model", default="smollm2", help="a known name, a model directory or a .gguf file")
    parser.add_argument("--systems", type=names, default=list(systems.names()), help="comma-separated")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--peers", type=Path, default=DEFAULT_HOME, help="where make bench-peers put them")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help=f"folder for {name}.json and {name}.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def chosen_model(options: argparse.Namespace, systems: Registry[Any]) -> Path:
    """The model's directory. Raises ConfigError for it, or for a system that there is not."""
    for name in options.systems:
        systems.get(name)
    with progress_bar() as progress:
        return resolve_model(options.model, progress)


def conclude(
    report: Report,
    options: argparse.Namespace,
    name: str,
    draw: Callable[[Report, Path], None],
    as_table: Callable[[Any], Table],
) -> None:
    """Files and output of a comparison that has ended."""
    report.machine["model"] = options.model
    publish(report, options.out / f"{name}.json", draw, note)
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        Console().print(as_table(report.rows))
