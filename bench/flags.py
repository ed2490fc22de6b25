"""What the comparisons' command lines have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kvferry.bench.figures import Report
from kvferry.core import ConfigError


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def counts(text: str) -> list[int]:
    return [positive(count) for count in text.split(",")]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {value}")
    return value


def note(message: str) -> None:
    """Progress: never on stdout, where scripts read."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def publish(report: Report, path: Path, draw: Callable[[Report, Path], None], say: Callable[[str], None]) -> None:
    """The report at `path`, and its picture beside it where matplotlib is installed."""
    report.write(path)
    picture = path.with_suffix(".png")
    try:
        draw(report, picture)
    except ConfigError as error:
        say(f"no picture: {error.message}")
        return
    say(f"written: {path}, {picture}")
