"""Interfaces of the transceiver layer: the agent ABI below, the runtime above.

An *agent* (one per backend and runtime language) moves bytes between registered memory of two processes.
A *transceiver* (one per worker) advertises, loads and releases caches over an agent; prefill and decode
schedulers see only the transceiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvferry.core import BlockTable, MemRegion, RankInfo, TokenRange
from kvferry.kvcache import BlockHold
from kvferry.transceiver.stats import TransferStats

CopyArray = npt.NDArray[np.uint64]
"""[copies, 3]: local address, remote address, bytes."""


class OpState(Enum):
    """A physical operation. IN_DOUBT: it failed or was abandoned, and may still touch memory.

    NOT_SUBMITTED is also what an operation falls back to when a fence took it along: it has not finished,
    touches no memory any more, and may be submitted anew.
    """

    NOT_SUBMITTED = "not_submitted"
    SUBMITTED = "submitted"
    DONE = "done"
    IN_DOUBT = "in_doubt"


class CancelOutcome(Enum):
    NOT_FOUND = "not_found"
    ALREADY_COMPLETE = "already_complete"
    CANCELLED_BEFORE_ADVERTISE = "cancelled_before_advertise"
    IN_FLIGHT = "in_flight"
    BACKEND_UNHEALTHY = "backend_unhealthy"


class Direction(Enum):
    READ = "read"
    WRITE = "write"


class Operation(ABC):
    """One submitted copy list. `release` it when it is DONE or has been given up."""

    @abstractmethod
    def poll(self) -> OpState:
        """Non-blocking. An error of the backend becomes IN_DOUBT, with `error` set; it never raises."""

    @property
    @abstractmethod
    def error(self) -> str: ...

    @abstractmethod
    def release(self) -> None: ...


class CompletedOperation(Operation):
    """Of an agent whose copies are complete when `submit` returns."""

    def poll(self) -> OpState:
        return OpState.DONE

    @property
    def error(self) -> str:
        return ""

    def release(self) -> None:
        pass


class Agent(ABC):
    """The agent ABI. Errors of the backend surface as TransferError. Not thread-safe: one thread uses it."""

    @abstractmethod
    def register(self, region: MemRegion) -> None: ...

    @abstractmethod
    def deregister(self, region: MemRegion) -> None: ...

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to reach the memory registered so far."""

    @abstractmethod
    def load_peer(self, incarnation: str, metadata: bytes) -> None: ...

    @abstractmethod
    def forget_peer(self, incarnation: str) -> None: ...

    @abstractmethod
    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        """Starts the copies. May block for their whole length (call it where that is allowed)."""

    @abstractmethod
    def notify(self, peer: str, message: bytes) -> None: ...

    @abstractmethod
    def drain_notifications(self) -> list[tuple[str, bytes]]:
        """(peer incarnation, message) pairs that arrived since the last call. Non-blocking; also the call that
        gives a backend without threads of its own the chance to make progress."""

    @abstractmethod
    def fence(self, peer: str) -> None:
        """Afterwards no local operation with `peer` can touch memory any more, and `peer` is forgotten.

        May take operations with other peers along (they poll as NOT_SUBMITTED) and change `metadata`; the other
        peers and all registered memory stay. TransferError when it could not be done: try again later."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended. error is None when every byte arrived and the generation check passed.

    transfer_id: the load id that `load` returned. in_doubt: the pages may still be written to until `when_quiet`
    says otherwise. nbytes: bytes moved. seconds: submit to DONE. in_part: see `planner.arrives_in_part`.
    """

    transfer_id: int
    nbytes: int = 0
    seconds: float = 0.0
    copies: int = 0
    error: str | None = None
    in_doubt: bool = False
    in_part: bool = False


class Transceiver(ABC):
    """What prefill and decode schedulers use. Thread-safe; callbacks run on the transceiver's own thread and
    must only enqueue."""

    @property
    @abstractmethod
    def local(self) -> RankInfo: ...

    @abstractmethod
    def connect(self, endpoint: str) -> RankInfo:
        """Handshakes with the peer at `endpoint` unless done already, and warms the path. Blocking, bounded.
        Raises TransferError naming what does not fit."""

    # -- source side ------------------------------------------------------------------------------------

    @abstractmethod
    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, on_release: Callable[[], None]
    ) -> bytes:
        """Mints the opaque handle of a hand-off. From now until DONE, FAILED, cancel or the lease's end the
        transceiver keeps `hold` pinned; then it calls `on_release` once, and the *engine thread* releases the hold."""

    @abstractmethod
    def withdraw(self, handle: bytes) -> CancelOutcome:
        """Gives up an advertised hand-off. Idempotent."""

    # -- destination side -------------------------------------------------------------------------------

    @abstractmethod
    def load(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
    ) -> int:
        """Starts pulling positions `tokens` of the advertised cache into the local blocks `tables` (one per group) and
        returns a load id at once. The table of a window begins with the first block that is to be filled, which may
        lie before `tokens`: then it lacks what those positions look back to, too. `on_done` is called exactly once. An
        empty range moves nothing and only tells the source that it is done. Whatever is wrong with the handle or the
        peer comes as `on_done` with an error, never as an exception; TransferError only once the transceiver is
        closed."""

    @abstractmethod
    def cancel_load(self, load_id: int) -> CancelOutcome:
        """`on_done` still follows, with error set, unless it has been called already (NOT_FOUND, ALREADY_COMPLETE).

        IN_FLIGHT: bytes are moving, and `on_done` comes when they have stopped."""

    def stats(self) -> TransferStats:
        """A snapshot of the counters. Non-blocking; zeros from a runtime that counts nothing."""
        return TransferStats()

    @abstractmethod
    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        """For a load that ended in doubt: calls `on_quiet` once no local operation can write its pages any more
        (at once, if that is so already; after the peer was fenced otherwise)."""

    @abstractmethod
    def close(self) -> None: ...
