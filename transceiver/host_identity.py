"""Which running machine this process is on: two processes with equal identities can share memory."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """boot_id: drawn anew by the kernel at every boot. hostname: only for messages."""

    boot_id: str
    hostname: str


def this_host() -> HostIdentity:
    return HostIdentity(_BOOT_ID.read_text(encoding="ascii").strip(), socket.gethostname())
