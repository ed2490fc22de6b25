"""Which process this one is, and whether another is known to have ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvferry.core import ProcessIdentity
from kvferry.transceiver.host_identity import this_host

_PROC = Path("/proc")
_PROBE_TIMEOUT_S = 0.5
_DEAD_STATES = frozenset("ZX")
"""Of /proc/PID/stat: what has given its memory back."""


def this_process() -> ProcessIdentity:
    _, started = _stat(os.getpid())
    return ProcessIdentity(_machine(), os.getpid(), started)


def is_dead(process: ProcessIdentity, endpoint: str) -> bool:
    """Whether `process`, which has listened at `endpoint` since it began, is proven to have ended. Silence proves
    nothing: it may have been stopped. May block for half a second where it ran on another machine."""
    if process.machine != _machine():
        return _refuses(endpoint)
    try:
        state, started = _stat(process.pid)
    except FileNotFoundError:
        return True
    return started != process.started or state in _DEAD_STATES


def _machine() -> str:
    return f"{this_host().boot_id}/{os.readlink(_PROC / 'self/ns/pid')}"


def _stat(pid: int) -> tuple[str, int]:
    """(state, start time in ticks). FileNotFoundError when there is no such process."""
    try:
        # The second field, a name in parentheses, may hold anything.
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except ProcessLookupError:  # it ended between open and read
        raise FileNotFoundError(pid) from None
    return fields[0], int(fields[19])


def _refuses(endpoint: str) -> bool:
    """Whether the machine at `endpoint` answers that nobody listens there: a stopped process would still."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False
