"""How long an advertised cache stays pinned without a sign of life from its reader. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """lease_s: from the last sign of life. max_s: from the grant, however alive the reader is."""

    lease_s: float
    max_s: float


@dataclass(slots=True)
class _Lease:
    expires_s: float
    last_s: float


class LeaseTable:
    """Expiry times by transfer id. All times are one process's monotonic seconds; they never cross the wire."""

    def __init__(self, policy: LeasePolicy) -> None:
        self._policy = policy
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._leases

    def grant(self, transfer_id: int, now_s: float) -> None:
        last_s = now_s + self._policy.max_s
        self._leases[transfer_id] = _Lease(min(now_s + self._policy.lease_s, last_s), last_s)

    def extend(self, transfer_id: int, now_s: float) -> bool:
        """False when there is no such lease. An expired one that was not swept yet revives."""
        lease = self._leases.get(transfer_id)
        if lease is None:
            return False
        lease.expires_s = min(now_s + self._policy.lease_s, lease.last_s)
        return True

    def drop(self, transfer_id: int) -> None:
        self._leases.pop(transfer_id, None)

    def expired(self, now_s: float) -> list[int]:
        """Ids whose lease has run out; they stay until dropped."""
        return [transfer_id for transfer_id, lease in self._leases.items() if lease.expires_s <= now_s]

    def next_expiry_s(self) -> float | None:
        return min((lease.expires_s for lease in self._leases.values()), default=None)
