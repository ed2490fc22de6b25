"""The loads of one worker and how they end: thread-safe, each outcome reported exactly once."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable

from kvferry.core import TransferError
from kvferry.transceiver.base import CancelOutcome, LoadResult
from kvferry.transceiver.sessions import InboundSession, LoadSession, SessionState, Verdict
from kvferry.transceiver.stats import FailureClass, StatsRecorder

_REMEMBERED_ENDS = 4096


class LoadTable:
    """The engine thread adds and cancels, the agent thread moves and ends loads, the clock ends overdue ones.
    Callbacks run outside the lock, on whichever thread caused them."""

    def __init__(self, stats: StatsRecorder) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._open: dict[int, InboundSession] = {}
        self._doubtful: dict[int, InboundSession] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._closed = False

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, load: InboundSession) -> None:
        """TransferError after `close`."""
        with self._lock:
            if self._closed:
                raise TransferError("the transceiver is closed")
            self._open[load.load_id] = load

    def close(self) -> list[InboundSession]:
        """Accepts no more; what is still open is the caller's to end."""
        with self._lock:
            self._closed = True
            return list(self._open.values())

    def open(self) -> list[InboundSession]:
        with self._lock:
            return list(self._open.values())

    def open_by(self, load_id: int) -> list[InboundSession]:
        """The open load of this id, if there is one."""
        with self._lock:
            load = self._open.get(load_id)
        return [] if load is None else [load]

    def counts(self) -> tuple[int, int]:
        """(open, in doubt)."""
        with self._lock:
            return len(self._open), len(self._doubtful)

    def move(self, load: InboundSession, state: SessionState) -> bool:
        """False when the load has ended meanwhile, or is to fail: do not go on."""
        with self._lock:
            if load.lifecycle.ended or load.verdict is not None:
                return False
            load.lifecycle.to(state)
            return True

    def sentence(self, load: InboundSession, verdict: Verdict) -> None:
        """The load will fail with `verdict` once its operation is at rest; the first verdict stays."""
        with self._lock:
            if not load.lifecycle.ended and load.verdict is None:
                load.verdict = verdict

    def pardon(self, load: InboundSession, failure: FailureClass) -> None:
        """Takes a verdict of this class back: what it was passed on has turned out well."""
        with self._lock:
            if load.verdict is not None and load.verdict.failure is failure:
                load.verdict = None

    def cancel(self, load_id: int) -> tuple[CancelOutcome, InboundSession | None]:
        """Sentences an open load; the session comes back when there is something left to do about it."""
        with self._lock:
            load = self._open.get(load_id)
            if load is None:
                known = load_id in self._ended
                return (CancelOutcome.ALREADY_COMPLETE if known else CancelOutcome.NOT_FOUND), None
            if load.verdict is None:
                load.verdict = Verdict(FailureClass.CANCELLED, "cancelled")
            begun = load.begun
        return (CancelOutcome.IN_FLIGHT if begun else CancelOutcome.CANCELLED_BEFORE_ADVERTISE), load

    def succeed(self, load: InboundSession, result: LoadResult) -> None:
        if self._finish(load, SessionState.DONE, at_rest=True) is not None:
            self._stats.loaded(result.nbytes, result.copies, result.seconds)
            self._report(load, result)

    def fail(self, load: InboundSession, verdict: Verdict, *, at_rest: bool) -> None:
        """Ends a load unless it has ended already. at_rest: no operation of it can touch memory."""
        cancelled = verdict.failure is FailureClass.CANCELLED
        state = SessionState.CANCELLED if cancelled else SessionState.FAILED
        in_doubt = self._finish(load, state, at_rest=at_rest)
        if in_doubt is not None:
            self._stats.failed(verdict.failure)
            self._report(load, LoadResult(load.load_id, error=verdict.message, in_doubt=in_doubt))

    def quiet(self, load: InboundSession) -> None:
        """The pages of a load in doubt are at rest now."""
        with self._lock:
            self._doubtful.pop(load.load_id, None)
            callbacks, load.on_quiet = load.on_quiet, []
        for callback in callbacks:
            self._stats.call(callback, f"on_quiet of load {load.load_id}")

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        with self._lock:
            load = self._doubtful.get(load_id)
            if load is not None:
                load.on_quiet.append(on_quiet)
                return
        self._stats.call(on_quiet, f"on_quiet of load {load_id}")

    def by_peer(self) -> dict[tuple[str, str], list[int]]:
        """Transfer ids to keep alive, by the (endpoint, incarnation) that holds them."""
        transfers: dict[tuple[str, str], list[int]] = defaultdict(list)
        with self._lock:
            for load in self._open.values():
                if isinstance(load, LoadSession) and load.peer is not None and load.signed is not None:
                    transfers[load.peer.endpoint, load.peer.incarnation].append(load.signed.handle.transfer_id)
        return transfers

    def of_transfers(self, incarnation: str, transfer_ids: Iterable[int]) -> list[LoadSession]:
        wanted = set(transfer_ids)
        with self._lock:
            return [
                load
                for load in self._open.values()
                if isinstance(load, LoadSession)
                and load.peer is not None
                and load.signed is not None
                and load.peer.incarnation == incarnation
                and load.signed.handle.transfer_id in wanted
            ]

    def _finish(self, load: InboundSession, state: SessionState, *, at_rest: bool) -> bool | None:
        """Whether the load ended in doubt; None when it had ended before."""
        with self._lock:
            if load.lifecycle.ended:
                return None
            in_doubt = load.begun and not at_rest
            load.lifecycle.to(state)
            del self._open[load.load_id]
            if in_doubt:
                self._doubtful[load.load_id] = load
            self._ended[load.load_id] = None
            while len(self._ended) > _REMEMBERED_ENDS:
                self._ended.popitem(last=False)
            return in_doubt

    def _report(self, load: InboundSession, result: LoadResult) -> None:
        self._stats.call(lambda: load.on_done(result), f"on_done of load {load.load_id}")
