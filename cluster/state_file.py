"""What a running cluster leaves on disk, so that another shell finds it: ``<state-dir>/cluster.json``."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from kvferry.cluster.processes import cluster_processes
from kvferry.core import ConfigError, UnavailableError

FILE_NAME = "cluster.json"
_VERSION = 1
_CONTROL_SERVICE = "gcs_server"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """grpc, http: the router's addresses. ray_head_pid None: the Ray cluster is somebody else's and stays up.

    actors: the names of the Ray actors this cluster started, the router's first.
    """

    cluster_id: str
    model: str
    grpc: str
    http: str
    ray_address: str
    ray_head_pid: int | None
    ray_temp_dir: str | None
    actors: tuple[str, ...]


def log_dir(state_dir: Path) -> Path:
    return state_dir / "logs"


def write_state(state_dir: Path, state: ClusterState) -> None:
    """Atomic: a reader sees the old file or the new one."""
    state_dir.mkdir(parents=True, exist_ok=True)
    temporary = state_dir / f"{FILE_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps({"version": _VERSION, **asdict(state)}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(state_dir / FILE_NAME)


def read_state(state_dir: Path) -> ClusterState | None:
    """None when no cluster was started from this directory. Raises ConfigError for a file of another version."""
    file = state_dir / FILE_NAME
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", field="state_dir") from None
    try:
        if loaded.pop("version") != _VERSION:
            raise ConfigError(f"{file} was written by another version of kvferry", field="state_dir")
        return ClusterState(**{**loaded, "actors": tuple(loaded["actors"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged: {error}", field="state_dir") from None


def require_state(state_dir: Path) -> ClusterState:
    state = read_state(state_dir)
    if state is None:
        raise ConfigError(
            f"no cluster is running from {state_dir}: start one with `kvferry up`, or name another --state-dir",
            field="state_dir",
        )
    return state


def alive(state: ClusterState) -> bool:
    """Whether a cluster on our own Ray head still runs; on somebody else's Ray: unknown, so True.

    It stands and falls with Ray's control service: without it all the others end, some only after a while.
    """
    return state.ray_head_pid is None or any(
        process.command.partition(" ")[0].endswith(_CONTROL_SERVICE) for process in cluster_processes(state.cluster_id)
    )


def require_running(state_dir: Path) -> ClusterState:
    """Raises ConfigError when no cluster was started from here, UnavailableError when the one that was has ended."""
    state = require_state(state_dir)
    if not alive(state):
        raise UnavailableError(
            f"cluster {state.cluster_id} of {state_dir} has ended: Ray's {_CONTROL_SERVICE} (started by pid "
            f"{state.ray_head_pid}) is gone, and with it the rest; `kvferry up` clears what is left and starts a new "
            f"one, {log_dir(state_dir)} says what the last one did",
            field="state_dir",
        )
    return state


def check_writable(state_dir: Path) -> None:
    """Raises ConfigError unless files can be made in `state_dir`. Leaves nothing behind."""
    missing = [path for path in (state_dir, *state_dir.parents) if not path.exists()]
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=state_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"the state directory {state_dir} cannot be written: {error.strerror or error}; name another --state-dir",
            field="state_dir",
        ) from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it was never made
                os.rmdir(path)


def remove_state(state_dir: Path) -> None:
    (state_dir / FILE_NAME).unlink(missing_ok=True)
