"""Where processes accept connections, from /proc."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def listening_addresses(pids: Iterable[int]) -> dict[str, list[int]]:
    """IP address -> TCP ports on which one of `pids` listens; IPv4 addresses in IPv6 clothes are told as IPv4."""
    sockets = {inode for pid in pids for inode in _socket_inodes(pid)}
    found: dict[str, list[int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN and rest[5] in sockets:
                address, _, port = local.partition(":")
                found.setdefault(_address(address), []).append(int(port, 16))
    return found


def _socket_inodes(pid: int) -> Iterable[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _address(text: str) -> str:
    """The kernel prints words of four bytes in the machine's byte order (here: little endian)."""
    words = bytes.fromhex(text)
    ip = ipaddress.ip_address(b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4)))
    return str(getattr(ip, "ipv4_mapped", None) or ip)
