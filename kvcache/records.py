"""A block's bytes under seal: what lies in a file is whole, or it is a miss."""

from __future__ import annotations

import hashlib
import struct

from kvferry.core import DIGEST_NBYTES

_MAGIC = b"kvferry1"
_CHECKSUM_NBYTES = 16
_HEADER = struct.Struct(f"<8sQ{DIGEST_NBYTES}s{_CHECKSUM_NBYTES}s")  # magic, payload bytes, digest, checksum
HEADER_NBYTES = _HEADER.size


def seal(digest: bytes, payload: bytes) -> bytes:
    """A record: a header with a checksum over digest and bytes, then the bytes."""
    return _HEADER.pack(_MAGIC, len(payload), digest, _checksum(digest, payload)) + payload


def unseal(record: bytes, digest: bytes, nbytes: int) -> bytes | None:
    """The `nbytes` sealed under `digest`; None when they are not whole, or others."""
    payload = record[HEADER_NBYTES:]
    return payload if len(payload) == nbytes and record == seal(digest, payload) else None


def sealed_digest(header: bytes, nbytes: int) -> bytes | None:
    """The digest of a record of `nbytes`, from its first HEADER_NBYTES; None where no such record begins. Whether the
    record is whole shows when it is unsealed."""
    magic, held, digest, _ = _HEADER.unpack(header)
    return digest if magic == _MAGIC and held == nbytes else None


def _checksum(digest: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_CHECKSUM_NBYTES, key=digest).digest()
