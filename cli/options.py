"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.cluster.config_sources import state_dir as resolve_state_dir
from kvferry.cluster.state_file import require_running

Json = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Which cluster: $KVFERRY_STATE_DIR, else ~/.local/state/kvferry.")
]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", help="host:port of the router's gRPC; from the state directory if absent.")
]


def find_endpoint(endpoint: str | None, state_dir: Path | None) -> str:
    """The address given, or the running cluster's. Raises ConfigError when there is none, UnavailableError
    when it has ended."""
    return endpoint or require_running(resolve_state_dir(state_dir)).grpc
