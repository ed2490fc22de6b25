"""`kvferry drain`: take a worker out of service gently."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.options import Endpoint, Json, StateDir, find_endpoint
from kvferry.cli.output import print_json, refusals, say
from kvferry.cluster.admin_client import AdminClient


def drain_command(
    worker: Annotated[str, typer.Argument(help="Its name, as `kvferry status` shows it.")],
    endpoint: Endpoint = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Give WORKER no new requests; running ones finish."""
    with refusals(as_json):
        with AdminClient(find_endpoint(endpoint, state_dir)) as admin:
            state = admin.drain(worker)
        if as_json:
            print_json({"worker": worker, "state": state})
        else:
            say(f"{worker} is {state}")
