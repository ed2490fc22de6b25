"""The destination side: loads, from handle to verified bytes, as a state machine on the agent thread."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from kvferry.core import KVFerryError, RankInfo, TransferError, rank_incarnation
from kvferry.transceiver.base import Agent, Direction, LoadResult, OpState
from kvferry.transceiver.control import ControlClient
from kvferry.transceiver.loads import LoadTable
from kvferry.transceiver.peers import Peers
from kvferry.transceiver.planner import RankTables, arrives_in_part, plan_generation_reads, plan_transfer
from kvferry.transceiver.protocol import Notification, NotificationKind, encode_notification, open_handle
from kvferry.transceiver.scratch import Scratch
from kvferry.transceiver.sessions import LoadSession, LoadStage, SessionState, Verdict
from kvferry.transceiver.stats import FailureClass, StatsRecorder

logger = logging.getLogger(__name__)

_MAX_RESUBMISSIONS = 8
"""How often fences of other loads may make one start over."""
_FENCE_RETRY_S = 1.0
_CANCEL_TIMEOUT_S = 1.0
_REMEMBERED_HANDLES = 4096


class Destination:
    """Used by the agent thread only. A load whose operation cannot be trusted to end makes its peer *suspect*;
    the next step fences suspects, and only then are the pages of such loads called quiet."""

    def __init__(
        self,
        agent: Agent,
        control: ControlClient,
        local: Callable[[], RankInfo],
        loads: LoadTable,
        stats: StatsRecorder,
        sent: Callable[[], None],
        fenced: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._control = control
        self._local = local
        self._loads = loads
        self._stats = stats
        self._sent = sent
        self._fenced = fenced
        self.scratch = Scratch(agent)
        self._active: dict[int, LoadSession] = {}
        self._spent: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._suspects: set[str] = set()
        self._fence_at_s = 0.0
        self._peers: Peers | None = None

    def attach(self, peers: Peers) -> None:
        self._peers = peers

    @property
    def peers(self) -> Peers:
        assert self._peers is not None
        return self._peers

    @property
    def healthy(self) -> bool:
        """False while a fence is failing: operations in doubt stay so."""
        return not self._suspects or self._fence_at_s == 0.0

    def until_fence_s(self, now_s: float) -> float | None:
        """Seconds until a fence that failed is tried again; None when none has."""
        return None if self.healthy else max(0.001, self._fence_at_s - now_s)

    # -- what happens to a load ---------------------------------------------------------------------------

    def start(self, load: LoadSession) -> None:
        try:
            load.signed = open_handle(load.data)
            handle = load.signed.handle
            if handle.tokens_digest != load.tokens_digest:
                raise TransferError("the transfer handle was made for another prompt", field="handle")
            if load.tokens.start < handle.tokens.start or load.tokens.stop > handle.tokens.stop:
                raise TransferError(f"positions {load.tokens} are wanted, the handle covers {handle.tokens}")
            if not load.part and (handle.incarnation, handle.transfer_id) in self._spent:
                raise TransferError("the transfer handle was used already", field="handle")
        except TransferError as error:
            self._end(load, Verdict(FailureClass.HANDLE, error.message))
            return
        self._reach(load)

    def sentenced(self, load: LoadSession) -> None:
        """A verdict was passed on `load`: end it, unless its operation has to come to rest first."""
        if load.verdict is not None and load.operation is None:
            self._end(load, load.verdict)

    def overdue(self, load: LoadSession) -> None:
        """The deadline of `load` has passed."""
        self._loads.sentence(load, Verdict(FailureClass.TIMEOUT, "the transfer did not finish in time"))
        if load.operation is not None:
            self.suspect(self._peer_of(load))
        elif load.lifecycle.ended:
            self._loads.quiet(load)
        else:
            self.sentenced(load)

    def suspect(self, incarnation: str) -> None:
        self._suspects.add(incarnation)

    def step(self, now_s: float) -> float | None:
        """Polls what is in flight; when the youngest operation was submitted, None when there is none."""
        for load in list(self._active.values()):
            self._advance(load)
        if self._suspects and now_s >= self._fence_at_s:
            self._fence(now_s)
        return max((load.submitted_s for load in self._active.values()), default=None)

    # -- reaching the source ------------------------------------------------------------------------------

    def _reach(self, load: LoadSession) -> None:
        assert load.signed is not None
        handle = load.signed.handle
        incarnation = rank_incarnation(handle.incarnation, load.source_rank)
        reached = self.peers.reach(handle.endpoint, incarnation, load.source_rank)
        reached.add_done_callback(lambda future: self._reached(load, future))

    def _reached(self, load: LoadSession, future: Future[RankInfo]) -> None:
        if load.lifecycle.ended:
            self._forget(load)
            self._loads.quiet(load)
            return
        try:
            rank = future.result()
        except TransferError as error:
            self._end(load, load.verdict or Verdict(FailureClass.PEER, error.message))
            return
        if load.begun:
            self._submit(load)
        else:
            self._prepare(load, rank)

    def _prepare(self, load: LoadSession, rank: RankInfo) -> None:
        """Verifies the handle with the key of the worker it names, plans, and begins."""
        assert load.signed is not None
        handle, local = load.signed.handle, self._local()
        try:
            if rank.incarnation != rank_incarnation(handle.incarnation, load.source_rank):
                raise TransferError(f"stale transfer handle: {rank.worker} has restarted since", field="handle")
            load.signed.verify(rank.handle_key)
        except TransferError as error:
            self._end(load, Verdict(FailureClass.HANDLE, error.message))
            return
        load.peer = rank
        try:
            source = RankTables(rank, handle.blocks)
            load.plan = plan_transfer(source, RankTables(local, load.tables), load.tokens)
            load.reads = plan_generation_reads(source, load.plan)
        except TransferError as error:
            self._end(load, Verdict(FailureClass.PLAN, error.message))
            return
        if not self._loads.move(load, SessionState.ADVERTISED):
            self.sentenced(load)
            return
        if load.companions is not None:
            load.companions.begin(load.load_id, rank)
        if load.lifecycle.ended or load.verdict is not None:
            self.sentenced(load)
        elif not load.plan.nbytes:
            self._succeed(load)
        else:
            self._begin(load)

    def _begin(self, load: LoadSession) -> None:
        try:
            if not load.part:
                self._tell(load, NotificationKind.BEGIN)
        except TransferError as error:
            self.suspect(self._peer_of(load))
            self._end(load, Verdict(FailureClass.PEER, error.message))
            return
        load.submitted_s = time.monotonic()
        if not self._loads.move(load, SessionState.TRANSFERRING):
            self.sentenced(load)
            return
        self._active[load.load_id] = load
        self._submit(load)

    # -- physical operations ------------------------------------------------------------------------------

    def _submit(self, load: LoadSession) -> None:
        """Submits the stage's operation and looks at it at once: small ones are often done by then."""
        assert load.plan is not None
        assert load.reads is not None
        copies = load.plan.copies
        if load.stage is LoadStage.GENERATIONS:
            load.scratch = load.scratch or self.scratch.take(len(load.reads.expected))
            copies = load.reads.copies(load.scratch.region.addr)
        try:
            load.operation = self._agent.submit(Direction.READ, self._peer_of(load), copies)
        except TransferError as error:
            self.suspect(self._peer_of(load))
            self._end(load, Verdict(FailureClass.BACKEND, error.message))
            return
        self._advance(load)

    def _advance(self, load: LoadSession) -> None:
        if load.operation is None:
            return
        state = load.operation.poll()
        if state is OpState.IN_DOUBT:
            self._loads.sentence(load, Verdict(FailureClass.BACKEND, load.operation.error))
            self.suspect(self._peer_of(load))
        elif state is not OpState.SUBMITTED:
            self._at_rest(load, finished=state is OpState.DONE)

    def _at_rest(self, load: LoadSession, *, finished: bool) -> None:
        """The operation of `load` touches no memory any more; unless `finished`, a fence took it."""
        assert load.operation is not None
        load.operation.release()
        load.operation = None
        if load.lifecycle.ended:
            self._forget(load)
            self._loads.quiet(load)
        elif load.verdict is not None:
            self._end(load, load.verdict)
        elif not finished:
            self._start_over(load)
        else:
            self._finished(load)

    def _finished(self, load: LoadSession) -> None:
        """The operation of `load` is DONE: the next stage, or the end."""
        if load.stage is LoadStage.DATA:
            load.stage = LoadStage.GENERATIONS
            self._submit(load)
        else:
            self._compare_generations(load)

    def _start_over(self, load: LoadSession) -> None:
        """Reads are idempotent: the same bytes go to the same pages, which nobody has looked at yet."""
        load.resubmissions += 1
        if load.resubmissions > _MAX_RESUBMISSIONS:
            message = f"started over {_MAX_RESUBMISSIONS} times because other transfers were cut off"
            self._end(load, Verdict(FailureClass.BACKEND, message))
        else:
            self._reach(load)

    def _compare_generations(self, load: LoadSession) -> None:
        assert load.reads is not None
        assert load.scratch is not None
        found = load.scratch.words[: len(load.reads.expected)]
        self._checked(load, int(np.count_nonzero(found != load.reads.expected)))

    def _checked(self, load: LoadSession, stale: int) -> None:
        """The generation check has been made: `stale` words are not what they must be."""
        assert load.reads is not None
        if stale:
            message = f"{stale} of {len(load.reads.expected)} source blocks were reused before they had been read"
            self._end(load, Verdict(FailureClass.GENERATION, message))
        else:
            self._succeed(load)

    def _fence(self, now_s: float) -> None:
        """Cuts every suspect off. Where that fails, its loads end in doubt now and it is tried again later."""
        for incarnation in list(self._suspects):
            try:
                self._agent.fence(incarnation)
            except KVFerryError as error:
                logger.error("cannot fence %s: %s", incarnation, error.message)
                self._fence_at_s = now_s + _FENCE_RETRY_S
                self._give_up(incarnation)
                continue
            self._fence_at_s = 0.0
            self._suspects.discard(incarnation)
            self._stats.fenced()
            self.peers.lost(incarnation)
            self._fenced(incarnation)
            for load in list(self._active.values()):
                if load.operation is not None and self._peer_of(load) == incarnation:
                    self._at_rest(load, finished=load.operation.poll() is OpState.DONE)

    def _give_up(self, incarnation: str) -> None:
        for load in list(self._active.values()):
            if load.verdict is not None and self._peer_of(load) == incarnation:
                self._loads.fail(load, load.verdict, at_rest=load.operation is None)

    # -- ends ---------------------------------------------------------------------------------------------

    def companions_done(self, load: LoadSession) -> None:
        """The loads that `load` speaks for have all ended well."""
        if load.awaits_companions and load.verdict is None and not load.lifecycle.ended:
            self._succeed(load)

    def _succeed(self, load: LoadSession) -> None:
        assert load.signed is not None
        assert load.plan is not None
        if load.companions is not None and not load.companions.all_done():
            load.awaits_companions = True  # the source must keep its blocks until the last rank has read them
            return
        self._forget(load)
        seconds = time.monotonic() - load.submitted_s if load.begun else 0.0
        result = LoadResult(
            load.load_id,
            nbytes=load.plan.nbytes,
            seconds=seconds,
            copies=len(load.plan.copies),
            in_part=arrives_in_part(load.plan, self._local(), load.tokens),
        )
        # The caller first: it has waited for this; the source only waits to reuse its pages.
        self._loads.succeed(load, result)
        if load.part:
            return
        self._spent[load.signed.handle.incarnation, load.signed.handle.transfer_id] = None
        while len(self._spent) > _REMEMBERED_HANDLES:
            self._spent.popitem(last=False)
        self._tell_end(load, NotificationKind.DONE)

    def _end(self, load: LoadSession, verdict: Verdict) -> None:
        self._forget(load)
        self._loads.fail(load, verdict, at_rest=True)
        if load.peer is not None and not load.part:
            self._tell_end(load, NotificationKind.FAILED)

    def _forget(self, load: LoadSession) -> None:
        self._active.pop(load.load_id, None)
        if load.scratch is not None:
            self.scratch.give(load.scratch)
            load.scratch = None

    def _tell_end(self, load: LoadSession, kind: NotificationKind) -> None:
        """The source may reuse its pages: told over the data path, or over the control channel when that is cut."""
        assert load.peer is not None
        assert load.signed is not None
        if self.peers.knows(load.peer.incarnation) and load.peer.incarnation not in self._suspects:
            try:
                self._tell(load, kind)
                return
            except TransferError as error:
                logger.warning("cannot tell %s: %s", load.peer.worker, error.message)
                self.suspect(load.peer.incarnation)
        handle = load.signed.handle
        self._control.cancel(
            handle.endpoint, handle.incarnation, handle.transfer_id, handle.nonce, timeout_s=_CANCEL_TIMEOUT_S
        )

    def _tell(self, load: LoadSession, kind: NotificationKind) -> None:
        self._agent.notify(self._peer_of(load), notification_of(load, kind))
        self._sent()

    def _peer_of(self, load: LoadSession) -> str:
        assert load.peer is not None
        return load.peer.incarnation


def notification_of(load: LoadSession, kind: NotificationKind) -> bytes:
    assert load.signed is not None
    handle = load.signed.handle
    nbytes = load.plan.nbytes if load.plan is not None else 0
    return encode_notification(Notification(kind, handle.transfer_id, handle.nonce, nbytes, load.tokens))
