"""Content keys of KV blocks: a SHA-256 chain over scope and tokens.

Equal scope and tokens give equal digests in every process and after every restart; a digest names the
whole prefix that ends with its block, not the block alone. Both KV managers and the router's prefix
index use these digests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_NBYTES = 32
_DOMAIN = b"kvferry.block.v1\0"


def scope_digest(scope: str) -> bytes:
    """The root of the chain. A scope separates prefixes that must never be shared (LoRA digest, salt)."""
    return hashlib.sha256(_DOMAIN + scope.encode()).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, the form every digest is taken over."""
    packed = array("I", token_ids)
    if packed.itemsize != 4:  # pragma: no cover - no such platform is supported
        raise RuntimeError("array('I') is not 32 bits wide")
    return packed.tobytes()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of the block holding `token_ids` after the prefix named by `parent`."""
    return hashlib.sha256(parent + token_bytes(token_ids)).digest()


def block_digests(scope: str, token_ids: Sequence[int], tokens_per_block: int) -> list[bytes]:
    """Digests of all *full* blocks of a prompt, first block first."""
    digests = []
    parent = scope_digest(scope)
    for start in range(0, len(token_ids) - tokens_per_block + 1, tokens_per_block):
        parent = block_digest(parent, token_ids[start : start + tokens_per_block])
        digests.append(parent)
    return digests


def tokens_digest(scope: str, token_ids: Sequence[int]) -> bytes:
    """Names scope and tokens exactly; a transfer handle carries it so that it serves no other prompt."""
    return hashlib.sha256(scope_digest(scope) + token_bytes(token_ids)).digest()
