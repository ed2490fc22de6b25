"""The control channel's interface: handshake, heartbeats, cancel. Bounded, and never blocking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from kvferry.core import RankInfo
from kvferry.transceiver.base import CancelOutcome


class ControlTarget(ABC):
    """The side that answers. Every method returns at once, from any thread."""

    @abstractmethod
    def answer_handshake(self, initiator: RankInfo) -> RankInfo:
        """Raises IncompatiblePeerError naming the difference."""

    @abstractmethod
    def answer_heartbeat(self, incarnation: str, transfer_ids: Sequence[int]) -> list[int]:
        """Extends leases; the ids that are not open here."""

    @abstractmethod
    def answer_cancel(self, transfer_id: int, nonce: bytes) -> CancelOutcome: ...


class ControlClient(ABC):
    """Calls peers. Futures end within `timeout_s`, with a TransferError if at all; callbacks run on any thread."""

    @abstractmethod
    def handshake(self, endpoint: str, initiator: RankInfo, timeout_s: float) -> Future[RankInfo]: ...

    @abstractmethod
    def heartbeat(
        self, endpoint: str, incarnation: str, transfer_ids: Sequence[int], timeout_s: float
    ) -> Future[tuple[int, ...]]:
        """The ids the peer no longer holds."""

    @abstractmethod
    def cancel(
        self, endpoint: str, incarnation: str, transfer_id: int, nonce: bytes, timeout_s: float
    ) -> Future[CancelOutcome]: ...

    @abstractmethod
    def close(self) -> None: ...
