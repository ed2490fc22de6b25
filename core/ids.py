"""Identifiers. Client-supplied ids are labels only; every key is minted here or by a worker."""

from __future__ import annotations

import secrets


def new_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"


def new_incarnation() -> str:
    """Names one life of one worker process: a restarted worker has another, and its old handles are void."""
    return secrets.token_hex(8)


def new_cluster_id() -> str:
    return f"kvf-{secrets.token_hex(4)}"
