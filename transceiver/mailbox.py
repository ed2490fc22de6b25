"""Notifications over TCP, for backends whose library has none that fit: one listener per agent, one line per peer.

A line begins with the caller's name and is answered at once, which tells a peer that lives from one whose kernel
alone answers. After that it carries frames one way. As little protected as the data path beside it.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass, field

from kvferry.core import TransferError

logger = logging.getLogger(__name__)

_HELLO = b"KVMAIL1 "
_ACCEPTED = b"+"
_LENGTH = struct.Struct("<I")
_MAX_FRAME_NBYTES = 1 << 16
_MAX_UNREAD = 1 << 16
"""Frames nobody has drained, from all peers together; past it the sender's line is cut."""
_MAX_UNSENT_NBYTES = 1 << 20
_CONTACT_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Caller:
    """name: empty until it has said hello."""

    line: socket.socket
    name: str = ""
    received: bytearray = field(default_factory=bytearray)


class Mailbox:
    """Listens on `host` with a thread of its own, which sleeps unless a peer calls or writes."""

    def __init__(self, host: str) -> None:
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=64)
        self._listener.setblocking(False)
        self.address: str = join_address(host, self._listener.getsockname()[1])
        self._ours, self._theirs = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._theirs, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kv-mailbox", daemon=True)
        self._thread.start()

    def drain(self) -> list[tuple[str, bytes]]:
        """(sender, frame) pairs that arrived since the last call."""
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        """Ends every line. Idempotent."""
        with contextlib.suppress(OSError):
            self._ours.send(b"x")
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._ours.close()

    def _run(self) -> None:
        ended = False
        while not ended:
            for key, _ in self._selector.select():
                if key.fileobj is self._theirs:
                    ended = True
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, _Caller(line))

    def _receive(self, caller: _Caller) -> None:
        try:
            arrived = caller.line.recv(_MAX_FRAME_NBYTES)
            if not arrived:
                raise ConnectionError("closed")
            caller.received += arrived
            self._take_frames(caller)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            logger.debug("mailbox: the line of %s ends: %s", caller.name or "a stranger", error)
            self._selector.unregister(caller.line)
            caller.line.close()

    def _take_frames(self, caller: _Caller) -> None:
        """ValueError for what no line of ours sends."""
        while len(caller.received) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(caller.received)
            if nbytes > _MAX_FRAME_NBYTES:
                raise ValueError(f"a frame of {nbytes} bytes")
            end = _LENGTH.size + nbytes
            if len(caller.received) < end:
                return
            frame = bytes(caller.received[_LENGTH.size : end])
            del caller.received[:end]
            if caller.name:
                if len(self._inbox) >= _MAX_UNREAD:
                    raise ValueError("more than anybody reads")
                self._inbox.append((caller.name, frame))
            else:
                if not frame.startswith(_HELLO):
                    raise ValueError("no hello")
                caller.name = frame.removeprefix(_HELLO).decode()
                caller.line.send(_ACCEPTED)


class MailLine:
    """The way to a peer's mailbox. Not thread-safe."""

    def __init__(self, address: str, own_name: str) -> None:
        """Blocks for two seconds at most; TransferError when nobody answers by then."""
        host, port = split_address(address)
        try:
            self._line = socket.create_connection((host, port), _CONTACT_TIMEOUT_S)
        except OSError as error:
            raise TransferError(f"the mailbox at {address} cannot be reached: {error}") from None
        self._unsent = bytearray()
        try:
            self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._line.sendall(_framed(_HELLO + own_name.encode()))
            answer = self._line.recv(1)
        except OSError as error:
            answer, reason = b"", str(error)
        else:
            reason = "it is no mailbox"
        if answer != _ACCEPTED:
            self._line.close()
            raise TransferError(f"the mailbox at {address} does not answer: {reason}")
        self._line.setblocking(False)

    @property
    def alive(self) -> bool:
        """The peer never writes on this line: anything readable is its end."""
        try:
            self._line.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, message: bytes) -> None:
        """Never blocks: what the kernel does not take waits for `flush`. TransferError when the peer is gone."""
        if len(self._unsent) > _MAX_UNSENT_NBYTES:
            raise TransferError("a peer reads none of its notifications")
        self._unsent += _framed(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._line.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self._unsent.clear()
            raise TransferError(f"a peer cannot be notified: {error}") from None

    def close(self) -> None:
        self._line.close()


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """TransferError for what is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise TransferError(f"{address!r} is no address")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
