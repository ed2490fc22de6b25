"""Sockets between the SHM agents of one host: the way to the peer's memory files, and its mailbox afterwards.

The listener has a name in the abstract namespace only, which goes with the process. A connection begins with the
caller's name, is answered with the memory files, and then carries the caller's notifications, one packet each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core import TransferError

logger = logging.getLogger(__name__)

HELLO = b"KVSHM1 "
_COUNT = struct.Struct("<I")
_FDS_PER_PACKET = 64
_MAX_PACKET_NBYTES = 1 << 16
_CONTACT_TIMEOUT_S = 2.0
_MAX_UNREAD = 1 << 16
"""Notifications nobody has drained, from all peers together; past it the sender's connection is cut."""


@dataclass(slots=True)
class _Caller:
    """A connection from a peer; `name` is empty until it has said hello."""

    connection: socket.socket
    name: str = ""


class ShmListener:
    """Answers callers on a thread of its own, which sleeps unless one calls. `fds` is asked at every contact.

    hand_over: takes each greeted connection, named, from then on; without it notifications are collected here.
    """

    def __init__(
        self,
        incarnation: str,
        fds: Callable[[], Sequence[int]],
        hand_over: Callable[[str, socket.socket], None] | None = None,
    ) -> None:
        self.address = f"kvferry-{secrets.token_hex(16)}"
        self._fds = fds
        self._hand_over = hand_over
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.address)
        self._socket.listen(64)
        self._socket.setblocking(False)
        self._stopped, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"kv-shm-{incarnation}", daemon=True)
        self._thread.start()

    def drain(self) -> list[tuple[str, bytes]]:
        """(caller's name, message) pairs since the last call."""
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        """Idempotent; callers see their connection end."""
        with contextlib.suppress(OSError):
            self._stop.send(b"x")
        self._thread.join(_CONTACT_TIMEOUT_S)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ, self._accept)
            selector.register(self._stopped, selectors.EVENT_READ, None)
            running = True
            while running:
                for key, _ in selector.select():
                    if key.data is None:
                        running = False
                    elif isinstance(key.data, _Caller):
                        self._receive(selector, key.data)
                    else:
                        key.data(selector)
            for key in list(selector.get_map().values()):
                if isinstance(key.data, _Caller):
                    key.data.connection.close()
        for end in (self._socket, self._stopped, self._stop):
            end.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            logger.warning("SHM: a caller was lost: %s", error)
            return
        uid = _uid_of(connection)
        if uid != os.getuid():
            logger.warning("SHM: refused a caller of user %d; workers that share memory run as one user", uid)
            connection.close()
            return
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, _Caller(connection))

    def _receive(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        try:
            packet = caller.connection.recv(_MAX_PACKET_NBYTES)
            if packet and not caller.name:
                self._greet(caller, packet)
                if self._hand_over is not None:
                    selector.unregister(caller.connection)
                    self._hand_over(caller.name, caller.connection)
            elif packet and len(self._inbox) < _MAX_UNREAD:
                self._inbox.append((caller.name, packet))
            else:
                self._hang_up(selector, caller)
        except OSError as error:
            logger.warning("SHM: lost %s: %s", caller.name or "a caller", error)
            self._hang_up(selector, caller)

    def _greet(self, caller: _Caller, packet: bytes) -> None:
        if not packet.startswith(HELLO):
            raise OSError("it does not speak this protocol")
        fds = self._fds()
        caller.connection.send(_COUNT.pack(len(fds)))
        for start in range(0, len(fds), _FDS_PER_PACKET):
            socket.send_fds(caller.connection, [b"f"], fds[start : start + _FDS_PER_PACKET])
        caller.name = packet.removeprefix(HELLO).decode(errors="replace")

    def _hang_up(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        selector.unregister(caller.connection)
        caller.connection.close()


class ShmLine:
    """A connection to a peer's listener. Owns the memory files it received until they are taken."""

    def __init__(self, incarnation: str, address: str) -> None:
        """Blocking, for `_CONTACT_TIMEOUT_S` at most. Raises TransferError."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(_CONTACT_TIMEOUT_S)
        self._fds: list[int] = []
        try:
            self.socket.connect("\0" + address)
            if _uid_of(self.socket) != os.getuid():
                raise TransferError("the peer runs as another user; workers that share memory run as one user")
            self.socket.send(HELLO + incarnation.encode())
            self._receive_fds()
            self.socket.setblocking(False)
        except (OSError, struct.error) as error:
            self.close()
            raise TransferError(f"no way to the peer's shared memory: {error}") from None
        except TransferError:
            self.close()
            raise

    def take_fds(self) -> list[int]:
        """The peer's memory files, now the caller's to close."""
        fds, self._fds = self._fds, []
        return fds

    def send(self, message: bytes) -> None:
        """Never blocks: TransferError when the peer is gone, or has stopped reading."""
        try:
            self.socket.send(message)
        except OSError as error:
            raise TransferError(f"the peer cannot be notified: {error}") from None

    @property
    def alive(self) -> bool:
        """Whether the peer's process still holds its end. It never sends, so anything readable is the end."""
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        for fd in self.take_fds():
            os.close(fd)
        self.socket.close()

    def _receive_fds(self) -> None:
        (count,) = _COUNT.unpack(self.socket.recv(_MAX_PACKET_NBYTES))
        while len(self._fds) < count:
            packet, fds, _, _ = socket.recv_fds(self.socket, 16, _FDS_PER_PACKET)
            self._fds += fds
            if not packet or not fds:
                raise OSError("it ended while the memory files were handed over")


def _uid_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
