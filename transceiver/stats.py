"""What a transceiver counts. Snapshots are values; `StatsRecorder` is the one place that changes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

logger = logging.getLogger(__name__)


class FailureClass(Enum):
    """Why a load failed, by what an operator would look at next."""

    HANDLE = "handle"
    """Malformed, forged, stale, replayed, or made for another prompt."""
    PEER = "peer"
    """The source could not be reached, or does not fit this worker."""
    PLAN = "plan"
    """Block tables and token range do not fit together, or the two sides expect different bytes."""
    BACKEND = "backend"
    """The agent reported an error while bytes were moving."""
    TIMEOUT = "timeout"
    GENERATION = "generation"
    """A source block was reused before it had been read."""
    LEASE = "lease"
    """The source no longer held the blocks."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since start, and two gauges. seconds: submit to DONE, summed over successful loads.

    open_holds: hand-offs whose blocks are pinned for a reader now. in_doubt: loads whose pages may still be
    written to. stray_notifications: messages that named no open transfer (late, duplicate or forged).
    """

    loads: int = 0
    nbytes: int = 0
    copies: int = 0
    seconds: float = 0.0
    failures: Mapping[FailureClass, int] = field(default_factory=dict)
    advertised: int = 0
    handed_off: int = 0
    expired_leases: int = 0
    stray_notifications: int = 0
    fences: int = 0
    callback_errors: int = 0
    open_holds: int = 0
    open_loads: int = 0
    in_doubt: int = 0


class StatsRecorder:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TransferStats()

    def loaded(self, nbytes: int, copies: int, seconds: float) -> None:
        with self._lock:
            now = self._stats
            self._stats = replace(
                now,
                loads=now.loads + 1,
                nbytes=now.nbytes + nbytes,
                copies=now.copies + copies,
                seconds=now.seconds + seconds,
            )

    def failed(self, failure: FailureClass) -> None:
        with self._lock:
            failures = dict(self._stats.failures)
            failures[failure] = failures.get(failure, 0) + 1
            self._stats = replace(self._stats, failures=failures)

    def advertised(self) -> None:
        with self._lock:
            self._stats = replace(self._stats, advertised=self._stats.advertised + 1)

    def handed_off(self) -> None:
        with self._lock:
            self._stats = replace(self._stats, handed_off=self._stats.handed_off + 1)

    def lease_expired(self) -> None:
        with self._lock:
            self._stats = replace(self._stats, expired_leases=self._stats.expired_leases + 1)

    def stray_notification(self) -> None:
        with self._lock:
            self._stats = replace(self._stats, stray_notifications=self._stats.stray_notifications + 1)

    def fenced(self) -> None:
        with self._lock:
            self._stats = replace(self._stats, fences=self._stats.fences + 1)

    def call(self, callback: Callable[[], None], what: str) -> None:
        """Calls what another part handed in. An error of it is logged under the name `what` and counted."""
        try:
            callback()
        except Exception:
            with self._lock:
                self._stats = replace(self._stats, callback_errors=self._stats.callback_errors + 1)
            logger.exception("%s", what)

    def snapshot(self, *, open_holds: int, open_loads: int, in_doubt: int) -> TransferStats:
        with self._lock:
            return replace(self._stats, open_holds=open_holds, open_loads=open_loads, in_doubt=in_doubt)
