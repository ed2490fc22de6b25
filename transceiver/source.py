"""The source side: advertised hand-offs, their leases, and what readers say about them."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvferry.core import BlockTable, InternalError, RankInfo, TokenRange, TransferError, TransferHandle
from kvferry.kvcache import BlockHold
from kvferry.transceiver.base import CancelOutcome
from kvferry.transceiver.leases import LeasePolicy, LeaseTable
from kvferry.transceiver.planner import RankTables, expected_nbytes
from kvferry.transceiver.protocol import (
    Notification,
    NotificationKind,
    new_nonce,
    new_transfer_id,
    open_handle,
    sign_handle,
)
from kvferry.transceiver.sessions import SessionState, SourceSession
from kvferry.transceiver.stats import StatsRecorder

logger = logging.getLogger(__name__)

_REMEMBERED_ENDS = 4096
"""How many ended transfers are told apart from ones that never were."""


class Source:
    """Thread-safe: the engine thread advertises and withdraws, the agent thread brings notifications, the clock
    sweeps, and gRPC extends leases. `on_release` runs on whichever of them ends a session."""

    def __init__(self, local: Callable[[], RankInfo], leases: LeasePolicy, stats: StatsRecorder) -> None:
        self._local = local
        self._stats = stats
        self._lock = threading.Lock()
        self._sessions: dict[int, SourceSession] = {}
        self._leases = LeaseTable(leases)
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._sessions)

    # -- engine thread ------------------------------------------------------------------------------------

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, on_release: Callable[[], None]
    ) -> bytes:
        """Mints a handle and grants its lease. InternalError when the hold does not cover `tokens`, TransferError
        after `close`."""
        local = self._local()
        _check_covers(local, hold.tables, tokens)
        now_s = time.monotonic()
        session = SourceSession(new_transfer_id(), new_nonce(), hold, tokens, on_release, advertised_s=now_s)
        handle = TransferHandle(
            incarnation=local.incarnation,
            endpoint=local.endpoint,
            transfer_id=session.transfer_id,
            nonce=session.nonce,
            tokens=tokens,
            blocks=hold.tables,
            tokens_digest=tokens_digest,
        )
        data = sign_handle(handle, local.handle_key)
        with self._lock:
            if self._closed:
                raise TransferError("the transceiver is closed")
            session.lifecycle.to(SessionState.ADVERTISED)
            self._sessions[session.transfer_id] = session
            self._leases.grant(session.transfer_id, now_s)
        self._stats.advertised()
        return data

    def withdraw(self, data: bytes) -> CancelOutcome:
        try:
            signed = open_handle(data)
            signed.verify(self._local().handle_key)
        except TransferError:
            return CancelOutcome.NOT_FOUND
        return self.cancel(signed.handle.transfer_id, signed.handle.nonce)

    # -- any thread ---------------------------------------------------------------------------------------

    def cancel(self, transfer_id: int, nonce: bytes) -> CancelOutcome:
        """IN_FLIGHT: the handle was out, so a peer may be reading; the generation check voids what it reads."""
        with self._lock:
            session = self._sessions.get(transfer_id)
            if session is None:
                known = transfer_id in self._ended
                return CancelOutcome.ALREADY_COMPLETE if known else CancelOutcome.NOT_FOUND
            if not hmac.compare_digest(session.nonce, nonce):
                return CancelOutcome.NOT_FOUND
            self._end(session, SessionState.CANCELLED)
        self._release([session])
        return CancelOutcome.IN_FLIGHT

    def heartbeat(self, transfer_ids: Sequence[int]) -> list[int]:
        """Extends the leases of open transfers; returns the ids that are not open."""
        now_s = time.monotonic()
        with self._lock:
            return [transfer_id for transfer_id in transfer_ids if not self._leases.extend(transfer_id, now_s)]

    def notified(self, note: Notification, reader: RankInfo | None) -> None:
        """A reader's BEGIN, DONE or FAILED. What names no open transfer (late, duplicate, forged) is only counted.

        reader: who sent it, as met at first contact; one that was forgotten meanwhile (None) is taken for our like."""
        with self._lock:
            session = self._sessions.get(note.transfer_id)
            if session is None or not hmac.compare_digest(session.nonce, note.nonce):
                session = None
            else:
                self._apply(session, note, reader or self._local())
        if session is None:
            self._stats.stray_notification()
        elif session.lifecycle.ended:
            if session.lifecycle.state is SessionState.DONE:
                self._stats.handed_off()
            self._release([session])

    def sweep(self, now_s: float) -> float | None:
        """Ends sessions whose lease has run out; the next expiry, if any is left. Their pages are only ever read
        by others, and the generation check voids a read that comes too late, so they may be reused at once."""
        with self._lock:
            expired = [self._sessions[transfer_id] for transfer_id in self._leases.expired(now_s)]
            for session in expired:
                self._end(session, SessionState.FAILED)
            upcoming = self._leases.next_expiry_s()
        for session in expired:
            self._stats.lease_expired()
            logger.warning("lease of transfer %d expired: no reader showed a sign of life", session.transfer_id)
        self._release(expired)
        return upcoming

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
            for session in sessions:
                self._end(session, SessionState.CANCELLED)
        self._release(sessions)

    def youngest(self) -> tuple[float | None, float | None]:
        """When the latest handle went out, and when the latest reader began: monotonic seconds, None for none."""
        with self._lock:
            advertised = [s.advertised_s for s in self._sessions.values() if s.lifecycle.can(SessionState.TRANSFERRING)]
            begun = [s.begun_s for s in self._sessions.values() if s.lifecycle.state is SessionState.TRANSFERRING]
        return max(advertised, default=None), max(begun, default=None)

    # -- under the lock -----------------------------------------------------------------------------------

    def _apply(self, session: SourceSession, note: Notification, reader: RankInfo) -> None:
        problem = self._mismatch(session, note, reader)
        if note.kind is NotificationKind.FAILED or problem:
            if problem:
                logger.error("transfer %d: %s", session.transfer_id, problem)
            self._end(session, SessionState.FAILED)
        elif note.kind is NotificationKind.DONE:
            self._end(session, SessionState.DONE)
        elif session.lifecycle.can(SessionState.TRANSFERRING):
            session.lifecycle.to(SessionState.TRANSFERRING)
            session.begun_s = time.monotonic()
            self._leases.extend(session.transfer_id, session.begun_s)

    def _mismatch(self, session: SourceSession, note: Notification, reader: RankInfo) -> str | None:
        """Whether the reader's expectation of what moves differs from ours."""
        if note.kind is NotificationKind.FAILED:
            return None
        if note.tokens.start < session.tokens.start or note.tokens.stop > session.tokens.stop:
            return f"the reader wants positions {note.tokens}, {session.tokens} are advertised"
        source = RankTables(self._local(), session.hold.tables)
        least, most = expected_nbytes(source, reader, note.tokens)
        if not least <= note.nbytes <= most:
            return f"the reader expects {note.nbytes} bytes for {note.tokens}, the source {least} to {most}"
        return None

    def _end(self, session: SourceSession, state: SessionState) -> None:
        session.lifecycle.to(state)
        del self._sessions[session.transfer_id]
        self._leases.drop(session.transfer_id)
        self._ended[session.transfer_id] = None
        while len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    # -- outside the lock ---------------------------------------------------------------------------------

    def _release(self, sessions: Iterable[SourceSession]) -> None:
        for session in sessions:
            self._stats.call(session.on_release, f"on_release of transfer {session.transfer_id}")


def _check_covers(local: RankInfo, tables: Sequence[BlockTable], tokens: TokenRange) -> None:
    if len(tables) != len(local.layouts):
        raise InternalError(f"a hold with {len(tables)} block tables for {len(local.layouts)} layer groups")
    for index, (layout, table) in enumerate(zip(local.layouts, tables, strict=True)):
        if len(table.generations) != len(table.block_ids):
            raise InternalError(
                f"layer group {index}: {len(table.block_ids)} blocks, {len(table.generations)} generations"
            )
        stop = (table.first_block + len(table.block_ids)) * layout.tokens_per_block
        if not layout.kind.is_state and stop < tokens.stop:
            raise InternalError(f"layer group {index}: the hold ends at position {stop}, {tokens.stop} was advertised")
