"""What travels: signed handles, and the fixed-layout notifications of the data path."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import Enum

from kvferry.core import InvalidRequestError, TokenRange, TransferError, TransferHandle
from kvferry.core.codec import handle_from_bytes, handle_to_bytes, signed_handle_from_bytes, signed_handle_to_bytes

NONCE_NBYTES = 16
KEY_NBYTES = 32
_MAGIC = b"KVF1"
# magic, kind, transfer id, nonce, bytes, first and one-past-last position; little-endian, no padding
_LAYOUT = struct.Struct(f"<4sBQ{NONCE_NBYTES}sQII")


class NotificationKind(Enum):
    """BEGIN: a reader starts. DONE: it has what it needs. FAILED: it gave up. After the last two it reads no more.

    A writer says DONE when all has been written, FAILED when it gave up, and writes no more after either."""

    BEGIN = 1
    DONE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Notification:
    """nbytes: what was or will be moved for `tokens`, so that the other side can compare."""

    kind: NotificationKind
    transfer_id: int
    nonce: bytes
    nbytes: int
    tokens: TokenRange


def encode_notification(note: Notification) -> bytes:
    return _LAYOUT.pack(
        _MAGIC,
        note.kind.value,
        note.transfer_id,
        note.nonce,
        note.nbytes,
        note.tokens.start,
        note.tokens.stop,
    )


def decode_notification(message: bytes) -> Notification:
    """Raises TransferError for anything that is not a notification of this version."""
    try:
        magic, kind, transfer_id, nonce, nbytes, start, stop = _LAYOUT.unpack(message)
        if magic != _MAGIC:
            raise ValueError(f"magic {magic!r}")
        return Notification(NotificationKind(kind), transfer_id, nonce, nbytes, TokenRange(start, stop))
    except (struct.error, ValueError) as error:
        raise TransferError(f"not a transfer notification: {error}") from None


def new_transfer_id() -> int:
    """Random, so that a restarted worker never meets an id of its former life."""
    return secrets.randbits(63)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_NBYTES)


def new_handle_key() -> bytes:
    return secrets.token_bytes(KEY_NBYTES)


@dataclass(frozen=True, slots=True)
class SignedHandle:
    """A handle as it came in. Nothing in it may be believed before `verify`."""

    handle: TransferHandle
    payload: bytes
    mac: bytes

    def verify(self, key: bytes) -> None:
        """Raises TransferError unless `key` signed it."""
        if not hmac.compare_digest(self.mac, _mac(key, self.payload)):
            raise TransferError("the transfer handle was not made by the worker it names", field="handle")


def sign_handle(handle: TransferHandle, key: bytes) -> bytes:
    payload = handle_to_bytes(handle)
    return signed_handle_to_bytes(payload, _mac(key, payload))


def open_handle(data: bytes) -> SignedHandle:
    """Parses an opaque handle; raises TransferError when it is malformed."""
    try:
        payload, mac = signed_handle_from_bytes(data)
        return SignedHandle(handle_from_bytes(payload), payload, mac)
    except InvalidRequestError as error:
        raise TransferError(f"malformed transfer handle: {error.message}", field="handle") from None


def agent_digest(metadata: bytes) -> bytes:
    """Names one life of an agent: a fence gives it another."""
    return hashlib.sha256(metadata).digest()


def _mac(key: bytes, payload: bytes) -> bytes:
    return hmac.new(key, payload, hashlib.sha256).digest()
