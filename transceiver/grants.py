"""The destination of pushes: room that was granted, who writes to it, and when its pages are nobody's again.

A one-sided write cannot be refused when it comes. So the two sides agree before the first byte: a writer asks, and
from the answer on the pages are its own until it has acknowledged an end. Neither a deadline nor a cancel changes
that; it takes the writer's word, its process's proven death, or another life of it at its address. Where it ended
without all its operations being done, bytes of its may be left on the path, which is then cut on this side too.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvferry.core import ProcessIdentity, RankInfo, TransferError, TransferHandle
from kvferry.kvcache import KVPool
from kvferry.transceiver.base import LoadResult
from kvferry.transceiver.control import ControlClient, PushReport, WriterState
from kvferry.transceiver.loads import LoadTable
from kvferry.transceiver.planner import RankTables, granted_nbytes, writes_in_part
from kvferry.transceiver.process_identity import is_dead
from kvferry.transceiver.protocol import Notification, NotificationKind, open_handle, sign_handle
from kvferry.transceiver.sessions import GrantSession, SessionState, Verdict
from kvferry.transceiver.stats import FailureClass

logger = logging.getLogger(__name__)


class Grants:
    """Thread-safe. `met`: a peer as it introduced itself. `cut`: has the path to a peer fenced, after which
    `path_was_cut` is to be called."""

    def __init__(
        self,
        local: Callable[[], RankInfo],
        pools: Sequence[KVPool],
        loads: LoadTable,
        control: ControlClient,
        met: Callable[[str], RankInfo | None],
        cut: Callable[[str], None],
        check_s: float,
    ) -> None:
        self._local = local
        self._pools = tuple(pools)
        self._loads = loads
        self._control = control
        self._met = met
        self._cut = cut
        self._check_s = check_s
        self._check_at_s = 0.0
        self._lock = threading.Lock()
        self._granted: dict[int, GrantSession] = {}

    def grant(self, session: GrantSession, tokens_digest: bytes) -> bytes:
        """TransferError after `LoadTable.close`."""
        local = self._local()
        handle = TransferHandle(
            incarnation=local.incarnation,
            endpoint=local.endpoint,
            transfer_id=session.transfer_id,
            nonce=session.nonce,
            tokens=session.tokens,
            blocks=session.tables,
            tokens_digest=tokens_digest,
        )
        self._loads.add(session)
        self._loads.move(session, SessionState.ADVERTISED)
        with self._lock:
            self._granted[session.transfer_id] = session
        return sign_handle(handle, local.handle_key)

    # -- what the writer says ---------------------------------------------------------------------------

    def opened(self, data: bytes, writer: str, process: ProcessIdentity) -> None:
        """A writer wants to begin. TransferError naming why it must not."""
        signed = open_handle(data)
        signed.verify(self._local().handle_key)
        if self._met(writer) is None:
            raise TransferError("a writer has to make first contact before it begins")
        with self._lock:
            session = self._granted.get(signed.handle.transfer_id)
            if session is None or not hmac.compare_digest(session.nonce, signed.handle.nonce):
                raise TransferError("the grant is void: it was taken back, or has ended", field="grant")
            if writer != session.writer.incarnation:
                raise TransferError("the grant was made for another worker", field="grant")
            if session.opened:
                raise TransferError("the grant was used already", field="grant")
            if self._reused(session):
                raise TransferError("the grant is stale: its pages have another owner", field="grant")
            # Before the state, which makes its pages the writer's.
            session.process, session.begun_s = process, time.monotonic()
            if not self._loads.move(session, SessionState.TRANSFERRING):
                session.process = None
                raise TransferError("the grant is void: it was taken back", field="grant")

    def _reused(self, session: GrantSession) -> bool:
        return any(
            pool.generations_of(table.block_ids) != table.generations
            for pool, table in zip(self._pools, session.tables, strict=True)
        )

    def notified(self, peer: str, note: Notification) -> bool:
        """DONE or FAILED. False for what names no grant, or comes from another."""
        with self._lock:
            session = self._granted.get(note.transfer_id)
        if session is None or not hmac.compare_digest(session.nonce, note.nonce):
            return False
        if peer != session.writer.incarnation:
            return False
        if note.kind is NotificationKind.FAILED:
            self._stopped(session, Verdict(FailureClass.PEER, "the writer gave up"), cut=False)
            return True
        if note.kind is NotificationKind.BEGIN or not session.opened:
            return False
        self._written(session, note.nbytes)
        return True

    # -- what becomes of a session ----------------------------------------------------------------------

    def taken_back(self, session: GrantSession) -> None:
        """A verdict was passed on it, or its deadline has gone by."""
        self._loads.sentence(session, Verdict(FailureClass.TIMEOUT, "the push did not finish in time"))
        if not session.opened:
            self._at_rest(session, None)
        else:
            self._ask(session)

    def path_was_cut(self, writer: str) -> None:
        """Nothing that `writer` sent can land any more."""
        with self._lock:
            waiting = [s for s in self._granted.values() if s.awaits_cut and s.writer.incarnation == writer]
        for session in waiting:
            self._at_rest(session, None)

    def _written(self, session: GrantSession, nbytes: int) -> None:
        """All of it, as the writer says."""
        writer = self._met(session.writer.incarnation)
        if writer is None or session.lifecycle.ended or session.verdict is not None:
            self._at_rest(session, Verdict(FailureClass.PEER, "the writer was forgotten"))
            return
        here = RankTables(self._local(), session.tables)
        least, most = granted_nbytes(here, writer, session.tokens)
        if not least <= nbytes <= most:
            message = f"the writer wrote {nbytes} bytes for {session.tokens}, {least} to {most} are expected"
            self._at_rest(session, Verdict(FailureClass.PLAN, message))
            return
        self._drop(session)
        seconds = time.monotonic() - (session.due_s or session.begun_s)
        in_part = writes_in_part(writer, here.rank)
        self._loads.succeed(session, LoadResult(session.load_id, nbytes=nbytes, seconds=seconds, in_part=in_part))

    def _stopped(self, session: GrantSession, verdict: Verdict, *, cut: bool) -> None:
        """The writer writes no more, and not all has come. cut: some may still be on its way."""
        if not (cut and session.opened):
            self._at_rest(session, verdict)
            return
        self._loads.sentence(session, verdict)
        if session.awaits_cut:
            return
        session.awaits_cut = True
        self._cut(session.writer.incarnation)

    def _at_rest(self, session: GrantSession, verdict: Verdict | None) -> None:
        self._drop(session)
        if session.lifecycle.ended:
            self._loads.quiet(session)
            return
        final = session.verdict or verdict
        assert final is not None
        self._loads.fail(session, final, at_rest=True)

    def _drop(self, session: GrantSession) -> None:
        with self._lock:
            self._granted.pop(session.transfer_id, None)

    # -- clock ------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> float | None:
        """Asks after every push that has begun or is due, also those whose loads have ended; when to come again."""
        with self._lock:
            sessions = list(self._granted.values())
        if not sessions:
            return None
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + self._check_s
            for session in sessions:
                if session.opened or session.due_s is not None:
                    self._ask(session)
        return self._check_at_s

    def youngest(self) -> tuple[float | None, float | None]:
        """When the latest grant was made, and when the latest writer began or had computed all; monotonic seconds."""
        with self._lock:
            granted = [s.granted_s for s in self._granted.values() if not s.opened]
            begun = [s.due_s or s.begun_s for s in self._granted.values() if s.opened and not s.lifecycle.ended]
        return max(granted, default=None), max(begun, default=None)

    def _ask(self, session: GrantSession) -> None:
        stop = session.verdict is not None or session.lifecycle.ended
        answer = self._control.check_push(
            session.writer.endpoint, session.transfer_id, session.nonce, timeout_s=self._check_s, stop=stop
        )
        answer.add_done_callback(lambda ended: self._answered(session, ended))

    def _answered(self, session: GrantSession, answer: Future[PushReport]) -> None:
        error = answer.exception()
        if error is not None:
            logger.warning("no word of the writer at %s: %s", session.writer.endpoint, error)
            if session.process is not None and is_dead(session.process, session.writer.endpoint):
                self._stopped(session, Verdict(FailureClass.PEER, "the writer's process has ended"), cut=True)
            return
        report = answer.result()
        if report.incarnation != session.writer.incarnation:
            self._stopped(session, Verdict(FailureClass.PEER, "the writer has restarted"), cut=True)
        elif report.state is WriterState.FAILED:
            self._stopped(session, Verdict(FailureClass.PEER, "the writer gave up"), cut=report.cut)
        elif report.state is WriterState.DONE and session.opened:
            self._written(session, report.nbytes)
        elif report.state is WriterState.UNKNOWN:
            self._stopped(session, Verdict(FailureClass.PEER, "the writer knows nothing of the push"), cut=False)
