"""`kvferry down`: stop what this cluster started."""

from __future__ import annotations

from kvferry.cli.options import Json, StateDir
from kvferry.cli.output import print_json, refusals, say
from kvferry.cluster.config_sources import state_dir as resolve_state_dir
from kvferry.cluster.launch import stop
from kvferry.cluster.state_file import read_state
from kvferry.core import UnavailableError


def down_command(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Stop the cluster started from this state directory. Its logs stay."""
    with refusals(as_json):
        directory = resolve_state_dir(state_dir)
        state = read_state(directory)
        if state is not None:
            left = stop(directory, state)
            if left:
                raise UnavailableError(f"could not be stopped: {', '.join(left)}")
        if as_json:
            print_json({"cluster_id": state.cluster_id if state else None, "stopped": state is not None})
        elif state is None:
            say(f"no cluster is running from {directory}")
        else:
            say(f"stopped {state.cluster_id}")
