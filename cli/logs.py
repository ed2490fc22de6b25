"""`kvferry logs`: what a worker, or the router, wrote."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kvferry.cli.options import StateDir
from kvferry.cli.output import refusals
from kvferry.cluster.config_sources import state_dir as resolve_state_dir
from kvferry.cluster.log_setup import log_path
from kvferry.cluster.state_file import log_dir
from kvferry.core import NotFoundError

POLL_S = 0.2


def logs_command(
    worker: Annotated[str, typer.Argument(help="A worker's name, or `router`.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more. Ctrl-C leaves.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Begin this many lines before the end.")] = 200,
    state_dir: StateDir = None,
) -> None:
    """Print the end of WORKER's log. Logs stay after `kvferry down`."""
    with refusals(False):
        path = find_log(log_dir(resolve_state_dir(state_dir)), worker)
        with path.open(encoding="utf-8", errors="replace") as file:
            sys.stdout.writelines(last_lines(file, lines))
            sys.stdout.flush()
            if follow:
                _follow(file)


def find_log(directory: Path, worker: str) -> Path:
    """Raises NotFoundError listing the logs there are."""
    known = sorted(path.stem for path in directory.glob("*.log"))
    if worker not in known:
        raise NotFoundError(
            f"no log of {worker!r} in {directory}; there are: {', '.join(known) or 'none'}", field="worker"
        )
    return log_path(directory, worker)


def last_lines(file: TextIO, count: int) -> list[str]:
    lines = file.readlines()
    return lines[-count:] if count else []


def _follow(file: TextIO) -> None:
    try:
        while True:
            text = file.read()
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
