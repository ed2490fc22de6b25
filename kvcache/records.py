"""A block's bytes under seal: what lies in a file is whole, or it is a miss."""

from __future__ import annotations

import hashlib
import struct
from enum import Enum

from kvferry.core import DIGEST_NBYTES


class Kind(Enum):
    """What a record is, by its first bytes. PARKED: of a suspended cache, which ends with the process."""

    BLOCK = b"kvferry1"
    PARKED = b"kvparked"


_CHECKSUM_NBYTES = 16
_HEADER = struct.Struct(f"<8sQ{DIGEST_NBYTES}s{_CHECKSUM_NBYTES}s")  # magic, payload bytes, digest, checksum
HEADER_NBYTES = _HEADER.size


def seal(digest: bytes, payload: bytes, kind: Kind = Kind.BLOCK) -> bytes:
    """A record: a header with a checksum over digest and bytes, then the bytes."""
    return _HEADER.pack(kind.value, len(payload), digest, _checksum(digest, payload)) + payload


def unseal(record: bytes, digest: bytes, nbytes: int, kind: Kind = Kind.BLOCK) -> bytes | None:
    """The `nbytes` sealed under `digest`; None when they are not whole, or others."""
    payload = record[HEADER_NBYTES:]
    return payload if len(payload) == nbytes and record == seal(digest, payload, kind) else None


def sealed_digest(header: bytes, nbytes: int) -> bytes | None:
    """The digest of a block's record of `nbytes`, from its first HEADER_NBYTES; None where no such record begins.
    Whether the record is whole shows when it is unsealed."""
    magic, held, digest, _ = _HEADER.unpack(header)
    return digest if magic == Kind.BLOCK.value and held == nbytes else None


def _checksum(digest: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_CHECKSUM_NBYTES, key=digest).digest()
