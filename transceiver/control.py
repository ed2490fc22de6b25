"""The control channel's interface: handshake, heartbeats, cancel, and what pushes need. Bounded, never blocking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from kvferry.core import ProcessIdentity, RankInfo
from kvferry.transceiver.base import CancelOutcome


class WriterState(Enum):
    """How a writer's push stands. UNKNOWN: it writes nothing under this id, and will not."""

    UNKNOWN = "unknown"
    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PushReport:
    """incarnation: of who answers. nbytes: written, when DONE. cut: FAILED by cutting the path to the destination, on
    which some of the bytes may still be."""

    incarnation: str
    state: WriterState
    nbytes: int = 0
    cut: bool = False


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

    @abstractmethod
    def answer_open_push(self, incarnation: str, grant: bytes, process: ProcessIdentity) -> bytes:
        """The writer may begin, once it has met the agent whose metadata has this digest (`protocol.agent_digest`).
        TransferError when it must not."""

    @abstractmethod
    def answer_check_push(self, transfer_id: int, nonce: bytes, *, stop: bool) -> PushReport: ...


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
    def open_push(
        self, endpoint: str, incarnation: str, grant: bytes, process: ProcessIdentity, timeout_s: float
    ) -> Future[bytes]: ...

    @abstractmethod
    def check_push(
        self, endpoint: str, transfer_id: int, nonce: bytes, timeout_s: float, *, stop: bool
    ) -> Future[PushReport]: ...

    @abstractmethod
    def close(self) -> None: ...
