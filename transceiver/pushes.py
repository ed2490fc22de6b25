"""The source of pushes: each part is written where the destination granted room, as soon as it is handed in."""

from __future__ import annotations

import hmac
import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from kvferry.core import RankInfo, TokenRange, TransferError
from kvferry.transceiver.base import Agent, Direction, OpState
from kvferry.transceiver.control import ControlClient, PushReport, WriterState
from kvferry.transceiver.peers import Peers
from kvferry.transceiver.planner import RankTables, plan_transfer
from kvferry.transceiver.process_identity import this_process
from kvferry.transceiver.protocol import (
    Notification,
    NotificationKind,
    agent_digest,
    encode_notification,
    open_handle,
)
from kvferry.transceiver.sessions import PushPart, PushSession, SessionState, Verdict
from kvferry.transceiver.stats import FailureClass, StatsRecorder

logger = logging.getLogger(__name__)

_REMEMBERED_ENDS = 4096
_CANCELLED = Verdict(FailureClass.CANCELLED, "cancelled")


class Pushes:
    """`open`, `report` and `overdue` from any thread, the rest on the agent thread, which `post` brings calls to.
    `cut`: has the path to a peer fenced, after which `path_was_cut` is to be called. `sent`, `timed`: a notification
    went out, a deadline was set."""

    def __init__(
        self,
        agent: Agent,
        control: ControlClient,
        local: Callable[[], RankInfo],
        peers: Peers,
        stats: StatsRecorder,
        post: Callable[[Callable[[], None]], None],
        cut: Callable[[str], None],
        sent: Callable[[], None],
        timed: Callable[[], None],
        transfer_timeout_s: float,
        open_timeout_s: float,
        rest_s: float,
    ) -> None:
        self._agent = agent
        self._control = control
        self._local = local
        self._peers = peers
        self._stats = stats
        self._post = post
        self._cut = cut
        self._sent = sent
        self._timed = timed
        self._transfer_timeout_s = transfer_timeout_s
        self._open_timeout_s = open_timeout_s
        self._rest_s = rest_s
        self._process = this_process()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, PushSession] = {}
        self._by_transfer: dict[int, PushSession] = {}
        self._ended: OrderedDict[int, tuple[bytes, PushReport]] = OrderedDict()
        self._closed = False

    # -- any thread -------------------------------------------------------------------------------------

    def open(self, data: bytes, tokens_digest: bytes, on_failed: Callable[[str], None]) -> tuple[int, TokenRange]:
        """TransferError for what is no grant, or one that is being used."""
        signed = open_handle(data)
        handle = signed.handle
        session = PushSession(next(self._ids), signed, tokens_digest, data, on_failed, reached=handle.tokens.start)
        with self._lock:
            if self._closed:
                raise TransferError("the transceiver is closed")
            if handle.transfer_id in self._by_transfer or handle.transfer_id in self._ended:
                raise TransferError("the grant was used already", field="grant")
            self._open[session.push_id] = session
            self._by_transfer[handle.transfer_id] = session
        self._post(lambda: self._start(session))
        return session.push_id, handle.tokens

    def push(self, push_id: int, part: PushPart) -> None:
        """Released at once when the push has ended."""
        self._post(lambda: self._add(push_id, part))

    def give_up(self, push_id: int) -> None:
        self._post(lambda: self._stop(push_id))

    def report(self, transfer_id: int, nonce: bytes, *, stop: bool) -> PushReport:
        """For whoever granted; `stop`: it wants no more."""
        incarnation = self._local().incarnation
        with self._lock:
            session = self._by_transfer.get(transfer_id)
            ended = self._ended.get(transfer_id)
        if session is not None and hmac.compare_digest(session.signed.handle.nonce, nonce):
            if stop:
                self.give_up(session.push_id)
            return PushReport(incarnation, WriterState.OPEN)
        if ended is not None and hmac.compare_digest(ended[0], nonce):
            return ended[1]
        return PushReport(incarnation, WriterState.UNKNOWN)

    def overdue(self, now_s: float) -> float | None:
        """Clock: the next deadline; what is past its own is posted to be cut off."""
        with self._lock:
            sessions = list(self._open.values())
        late = [session for session in sessions if session.deadline_s <= now_s]
        for session in late:
            self._post_overdue(session)
        return min((session.deadline_s for session in sessions if now_s < session.deadline_s < math.inf), default=None)

    def _post_overdue(self, session: PushSession) -> None:
        self._post(lambda: self._expire(session))

    def close(self) -> None:
        """Once the agent is gone, or its thread does not come back: nobody will be told, nothing written any more."""
        with self._lock:
            self._closed = True
            sessions = list(self._open.values())
        for session in sessions:
            self._finish(session, Verdict(FailureClass.CANCELLED, "the transceiver was closed"), nbytes=0)

    # -- the grant --------------------------------------------------------------------------------------

    def _start(self, session: PushSession) -> None:
        handle = session.signed.handle
        reached = self._peers.reach(handle.endpoint, handle.incarnation)
        reached.add_done_callback(lambda future: self._reached(session, future))

    def _reached(self, session: PushSession, future: Future[RankInfo]) -> None:
        if session.lifecycle.ended:
            return
        handle = session.signed.handle
        try:
            session.peer = future.result()
            if session.peer.incarnation != handle.incarnation:
                raise TransferError(f"stale grant: {session.peer.worker} has restarted since", field="grant")
            session.signed.verify(session.peer.handle_key)
            if handle.tokens_digest != session.tokens_digest:
                raise TransferError("the grant was made for another prompt", field="grant")
        except TransferError as error:
            self._fail(session, Verdict(FailureClass.HANDLE if session.peer else FailureClass.PEER, error.message))
            return
        session.lifecycle.to(SessionState.ADVERTISED)
        answer = self._control.open_push(
            handle.endpoint, self._local().incarnation, session.data, self._process, timeout_s=self._open_timeout_s
        )
        answer.add_done_callback(lambda ended: self._post(lambda: self._opened(session, ended)))

    def _opened(self, session: PushSession, answer: Future[bytes]) -> None:
        """Not before this does a byte move. Who has given up meanwhile says so when asked."""
        if session.lifecycle.ended:
            return
        assert session.peer is not None
        error = answer.exception()
        if error is not None:
            self._fail(session, Verdict(FailureClass.PEER, str(error)))
        elif answer.result() == agent_digest(session.peer.agent_metadata):
            self._begin(session)
        else:
            # It has fenced somebody since we met: what we know of its memory leads nowhere.
            self._peers.lost(session.peer.incarnation)
            handle = session.signed.handle
            met = self._peers.reach(handle.endpoint, handle.incarnation)
            met.add_done_callback(lambda future: self._met_again(session, future))

    def _met_again(self, session: PushSession, future: Future[RankInfo]) -> None:
        if session.lifecycle.ended:
            return
        try:
            session.peer = future.result()
        except TransferError as error:
            self._fail(session, Verdict(FailureClass.PEER, error.message))
            return
        self._begin(session)

    def _begin(self, session: PushSession) -> None:
        session.lifecycle.to(SessionState.TRANSFERRING)
        self._next(session)

    # -- parts ------------------------------------------------------------------------------------------

    def _add(self, push_id: int, part: PushPart) -> None:
        session = self._open.get(push_id)
        if session is None or session.verdict is not None:
            self._release(part)
            return
        session.waiting.append(part)
        self._next(session)

    def _next(self, session: PushSession) -> None:
        """Submits the next part there is, one at a time."""
        while session.waiting and session.part is None and session.lifecycle.state is SessionState.TRANSFERRING:
            session.part = session.waiting.popleft()
            self._write(session, session.part)

    def _write(self, session: PushSession, part: PushPart) -> None:
        assert session.peer is not None
        handle = session.signed.handle
        try:
            if part.tokens.start != session.reached or part.tokens.stop > handle.tokens.stop:
                raise TransferError(f"{part.tokens} does not follow position {session.reached} of {handle.tokens}")
            plan = plan_transfer(
                RankTables(self._local(), part.hold.tables), RankTables(session.peer, handle.blocks), part.tokens
            )
        except TransferError as error:
            self._fail(session, Verdict(FailureClass.PLAN, error.message))
            return
        session.part_nbytes = plan.nbytes
        if not plan.nbytes:
            self._written(session)
            return
        session.submitted_s = time.monotonic()
        session.deadline_s = session.submitted_s + self._transfer_timeout_s
        try:
            session.operation = self._agent.submit(Direction.WRITE, session.peer.incarnation, plan.writes)
        except TransferError as error:
            # Nothing says how much of it was taken before it went wrong.
            session.verdict = session.verdict or Verdict(FailureClass.BACKEND, error.message)
            self._cut(session.peer.incarnation)
            return
        self._timed()
        self._advance(session)

    def _advance(self, session: PushSession) -> None:
        if session.operation is None:
            return
        state = session.operation.poll()
        if state is OpState.DONE:
            self._rest(session)
            if session.verdict is not None:
                self._fail(session, session.verdict)
            else:
                self._written(session)
        elif state is OpState.NOT_SUBMITTED:
            self._cut_off(session, "cut off with another transfer")
        elif state is OpState.IN_DOUBT and session.verdict is None:
            assert session.peer is not None
            session.verdict = Verdict(FailureClass.BACKEND, session.operation.error)
            self._cut(session.peer.incarnation)

    def _cut_off(self, session: PushSession, reason: str) -> None:
        """A fence has ended its operation: what was sent before may still be on the path."""
        session.cut = True
        self._rest(session)
        self._fail(session, session.verdict or Verdict(FailureClass.BACKEND, reason))

    def _rest(self, session: PushSession) -> None:
        if session.operation is not None:
            session.operation.release()
        session.operation, session.deadline_s = None, math.inf

    def _written(self, session: PushSession) -> None:
        part, session.part = session.part, None
        assert part is not None
        session.nbytes += session.part_nbytes
        session.reached = part.tokens.stop
        self._release(part)
        if session.reached == session.signed.handle.tokens.stop:
            self._succeed(session)
        else:
            self._next(session)

    # -- ends -------------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Polls what is under way; when the youngest operation was submitted, None when there is none."""
        sessions = [session for session in list(self._open.values()) if session.operation is not None]
        for session in sessions:
            self._advance(session)
        return max((session.submitted_s for session in sessions if session.operation is not None), default=None)

    def path_was_cut(self, peer: str) -> None:
        """No operation with `peer` can touch its memory any more."""
        for session in list(self._open.values()):
            if session.peer is None or session.peer.incarnation != peer or session.part is None:
                continue
            if session.operation is not None and session.operation.poll() is OpState.DONE:
                self._advance(session)
            else:
                self._cut_off(session, "the path was cut")

    def _stop(self, push_id: int) -> None:
        session = self._open.get(push_id)
        if session is None or session.verdict is not None:
            return
        if session.part is None:
            self._fail(session, _CANCELLED)
            return
        # It gets a while to come to rest, then the path is cut: the pages are wanted elsewhere, on both sides.
        session.verdict = _CANCELLED
        session.deadline_s = min(session.deadline_s, time.monotonic() + self._rest_s)
        self._timed()

    def _expire(self, session: PushSession) -> None:
        if session.operation is None or session.deadline_s > time.monotonic():
            return
        assert session.peer is not None
        session.verdict = session.verdict or Verdict(FailureClass.TIMEOUT, "a part was not written in time")
        session.deadline_s = time.monotonic() + self._rest_s
        self._cut(session.peer.incarnation)

    def _succeed(self, session: PushSession) -> None:
        handle = session.signed.handle
        self._finish(session, None, nbytes=session.nbytes)
        self._stats.handed_off()
        self._tell(
            session,
            Notification(NotificationKind.DONE, handle.transfer_id, handle.nonce, session.nbytes, handle.tokens),
        )

    def _fail(self, session: PushSession, verdict: Verdict) -> None:
        assert session.operation is None
        handle = session.signed.handle
        logger.warning("push %d: %s", handle.transfer_id, verdict.message)
        verified = session.lifecycle.state is not SessionState.CREATED
        self._finish(session, verdict, nbytes=0)
        if verified and not session.cut:
            self._tell(
                session, Notification(NotificationKind.FAILED, handle.transfer_id, handle.nonce, 0, handle.tokens)
            )

    def _finish(self, session: PushSession, verdict: Verdict | None, *, nbytes: int) -> None:
        """Remembers how it ended, for whoever granted, then lets go of every page."""
        handle = session.signed.handle
        verified = session.lifecycle.state is not SessionState.CREATED
        if verdict is None:
            session.lifecycle.to(SessionState.DONE)
        else:
            cancelled = verdict.failure is FailureClass.CANCELLED
            session.lifecycle.to(SessionState.CANCELLED if cancelled else SessionState.FAILED)
        state = WriterState.DONE if verdict is None else WriterState.FAILED
        report = PushReport(self._local().incarnation, state, nbytes, session.cut)
        with self._lock:
            del self._open[session.push_id]
            del self._by_transfer[handle.transfer_id]
            if verified:  # what was not may name any grant
                self._ended[handle.transfer_id] = (handle.nonce, report)
            while len(self._ended) > _REMEMBERED_ENDS:
                self._ended.popitem(last=False)
        parts = [session.part] if session.part is not None else []
        for part in [*parts, *session.waiting]:
            self._release(part)
        session.part = None
        session.waiting.clear()
        if verdict is not None:
            self._stats.call(lambda: session.on_failed(verdict.message), f"on_failed of push {session.push_id}")

    def _tell(self, session: PushSession, note: Notification) -> None:
        """Whoever granted asks when it hears nothing."""
        assert session.peer is not None
        if not self._peers.knows(session.peer.incarnation):
            return
        try:
            self._agent.notify(session.peer.incarnation, encode_notification(note))
        except TransferError as error:
            logger.warning("cannot tell %s: %s", session.peer.worker, error.message)
            return
        self._sent()

    def _release(self, part: PushPart) -> None:
        self._stats.call(part.on_release, "on_release of a push's part")
