"""`kvferry top`: the status, live."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from kvferry.cli.options import Endpoint, StateDir, find_endpoint
from kvferry.cli.output import refusals
from kvferry.cli.status import facts_console, status_dict, status_view
from kvferry.cluster.admin_client import AdminClient
from kvferry.core import UnavailableError


def top_command(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many looks.")] = None,
    endpoint: Endpoint = None,
    state_dir: StateDir = None,
) -> None:
    """Watch workers, blocks and requests. Ctrl-C leaves. Into a pipe: one look, or --count of them."""
    with refusals(False), AdminClient(find_endpoint(endpoint, state_dir)) as admin:
        if not sys.stdout.isatty():
            _print_looks(admin, count or 1, interval)
            return
        view: RenderableType = status_view(status_dict(admin.status()))
        looks = 1
        try:
            with Live(view, console=Console(), auto_refresh=False) as live:
                while count is None or looks < count:
                    time.sleep(interval)
                    live.update(_look(admin), refresh=True)
                    looks += 1
        except KeyboardInterrupt:
            return


def _print_looks(admin: AdminClient, count: int, interval: float) -> None:
    console = facts_console()
    console.print(status_view(status_dict(admin.status())))
    for _ in range(count - 1):
        time.sleep(interval)
        console.print(_look(admin))


def _look(admin: AdminClient) -> RenderableType:
    try:
        return status_view(status_dict(admin.status()))
    except UnavailableError as error:  # the router may be restarting: keep looking
        return Text(error.message, style="red")
