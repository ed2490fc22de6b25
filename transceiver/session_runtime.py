"""What both runtimes share: sessions, planning, leases and control over an agent.

Two threads, both asleep when nothing is open. The *agent thread* alone touches the agent, whose calls may block
for as long as a copy lasts. The *clock thread* alone watches time: deadlines, leases and heartbeats go on however
long the other is blocked.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from kvferry.core import BlockTable, MemRegion, ProcessIdentity, RankInfo, TokenRange, TransferError
from kvferry.kvcache import BlockHold, KVPool
from kvferry.transceiver.base import Agent, CancelOutcome, LoadResult, PushSide, Transceiver
from kvferry.transceiver.control import ControlClient, ControlTarget, PushReport
from kvferry.transceiver.destination import Destination
from kvferry.transceiver.grants import Grants
from kvferry.transceiver.handshake import check_peer
from kvferry.transceiver.implementation import RuntimeTimes, WorkerIdentity
from kvferry.transceiver.leases import LeasePolicy
from kvferry.transceiver.loads import LoadTable
from kvferry.transceiver.loop import Loop, Sleeper
from kvferry.transceiver.peers import Peers
from kvferry.transceiver.polling import PollDemand
from kvferry.transceiver.protocol import agent_digest, decode_notification, new_handle_key
from kvferry.transceiver.push_half import PushHalf
from kvferry.transceiver.pushes import Pushes
from kvferry.transceiver.sessions import Companions, GrantSession, InboundSession, LoadSession, Verdict
from kvferry.transceiver.source import Source
from kvferry.transceiver.stats import FailureClass, StatsRecorder, TransferStats

logger = logging.getLogger(__name__)

_REMEMBERED_INITIATORS = 1024


class SessionRuntime(Transceiver, ControlTarget):
    """Owns `agent` and `control`, and registers `pools`, which must outlive it. A subclass says who watches the agent:
    `_next_look_s` is asked after every turn of the agent thread, which `sleeper` puts to sleep."""

    def __init__(
        self,
        identity: WorkerIdentity,
        pools: Sequence[KVPool],
        agent: Agent,
        control: ControlClient,
        times: RuntimeTimes,
        *,
        sleeper: Sleeper,
        destination: type[Destination],
    ) -> None:
        self._agent = agent
        self._control = control
        self._times = times
        self._recorder = StatsRecorder()
        self._local = _register(identity, pools, agent)
        self._attention_until_s = 0.0
        self._met: OrderedDict[str, RankInfo] = OrderedDict()
        self._drain_error = ""
        self._closed = threading.Event()
        self._source = Source(lambda: self._local, LeasePolicy(times.lease_s, times.max_lease_s), self._recorder)
        self._loads = LoadTable(self._recorder)
        self._destination = destination(
            agent, control, lambda: self._local, self._loads, self._recorder, self._sent, self._fenced
        )
        self._agent_loop = Loop(f"kv-agent-{identity.worker}", self._agent_step, sleeper)
        self._clock = Loop(f"kv-clock-{identity.worker}", self._clock_step)
        self._peers = Peers(
            agent,
            control,
            lambda: self._local,
            self._destination.scratch,
            self._agent_loop.post,
            times.handshake_timeout_s,
            self._destination.suspect,
        )
        self._destination.attach(self._peers)
        self._push = self._push_half(pools)
        self._heartbeat_at_s = 0.0
        self._agent_loop.start()
        self._clock.start()

    def _push_half(self, pools: Sequence[KVPool]) -> PushHalf:
        grants = Grants(
            lambda: self._local,
            pools,
            self._loads,
            self._control,
            self._met.get,
            lambda writer: self._agent_loop.post(lambda: self._destination.suspect(writer)),
            self._times.heartbeat_s,
        )
        pushes = Pushes(
            self._agent,
            self._control,
            lambda: self._local,
            self._peers,
            self._recorder,
            self._agent_loop.post,
            self._destination.suspect,
            self._sent,
            lambda: self._clock.wake(),
            self._times.transfer_timeout_s,
            self._times.handshake_timeout_s,
            self._times.rest_s,
        )
        return PushHalf(grants, pushes, self._loads, pools, self._wake, self._times.transfer_timeout_s)

    def _wake(self) -> None:
        self._agent_loop.wake()
        self._clock.wake()

    # -- Transceiver --------------------------------------------------------------------------------------

    @property
    def local(self) -> RankInfo:
        return self._local

    def connect(self, endpoint: str) -> RankInfo:
        return self.connect_rank(endpoint, 0)

    def connect_rank(self, endpoint: str, rank_index: int) -> RankInfo:
        """As `connect`, with one rank of the worker at `endpoint`."""
        self._check_open()
        reached: Future[RankInfo] = Future()
        self._agent_loop.post(lambda: _chain(self._peers.reach(endpoint, None, rank_index), reached))
        try:
            return reached.result(self._times.handshake_timeout_s + self._times.grace_s)
        except FutureTimeoutError:
            raise TransferError(f"no contact with {endpoint} within {self._times.handshake_timeout_s:g} s") from None

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, on_release: Callable[[], None]
    ) -> bytes:
        self._check_open()
        data = self._source.advertise(hold, tokens, tokens_digest, on_release)
        self._wake()
        return data

    def withdraw(self, handle: bytes) -> CancelOutcome:
        return self._help_reader(self._source.withdraw(handle))

    def load(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
    ) -> int:
        return self._start_load(self._new_load(handle, tokens_digest, tables, tokens, on_done))

    def load_for_all(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
        companions: Companions,
    ) -> int:
        """As `load`, but it speaks for `companions` too: the source is told that it is done once they all are."""
        load = self._new_load(handle, tokens_digest, tables, tokens, on_done)
        load.companions = companions
        return self._start_load(load)

    def load_part(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        source_rank: int,
        on_done: Callable[[LoadResult], None],
    ) -> int:
        """Pulls what rank `source_rank` of the source has for this rank, saying nothing to the source: another load
        speaks for it."""
        load = self._new_load(handle, tokens_digest, tables, tokens, on_done)
        load.source_rank, load.part = source_rank, True
        return self._start_load(load)

    def companions_done(self, load_id: int) -> None:
        """Every companion of a load has ended well; unknown ids are ignored."""
        for load in self._loads.open_by(load_id):
            if isinstance(load, LoadSession):
                self._post_companions_done(load)

    def _post_companions_done(self, load: LoadSession) -> None:
        self._agent_loop.post(lambda: self._destination.companions_done(load))

    def fail_load(self, load_id: int, message: str) -> None:
        """A companion failed, so the load does; unknown ids are ignored. `on_done` follows as for `cancel_load`."""
        for load in self._loads.open_by(load_id):
            self._loads.sentence(load, Verdict(FailureClass.PEER, message))
            self._post_sentenced(load)

    def attend(self, seconds: float) -> None:
        """Helps readers along for a while, who may need this agent to look."""
        self._attend(seconds)

    def _new_load(
        self,
        handle: bytes,
        tokens_digest: bytes,
        tables: Sequence[BlockTable],
        tokens: TokenRange,
        on_done: Callable[[LoadResult], None],
    ) -> LoadSession:
        self._check_open()
        return LoadSession(
            load_id=self._loads.next_id(),
            data=handle,
            tokens_digest=tokens_digest,
            tables=tuple(tables),
            tokens=tokens,
            on_done=on_done,
            deadline_s=time.monotonic() + self._times.transfer_timeout_s,
        )

    def _start_load(self, load: LoadSession) -> int:
        self._loads.add(load)
        self._agent_loop.post(lambda: self._destination.start(load))
        self._clock.wake()
        return load.load_id

    def cancel_load(self, load_id: int) -> CancelOutcome:
        outcome, load = self._loads.cancel(load_id)
        if load is not None:
            self._post_sentenced(load)
            if not self._destination.healthy:
                return CancelOutcome.BACKEND_UNHEALTHY
        return outcome

    def when_quiet(self, load_id: int, on_quiet: Callable[[], None]) -> None:
        self._loads.when_quiet(load_id, on_quiet)

    @property
    def push_side(self) -> PushSide | None:
        return self._push if self._agent.writes_land else None

    def stats(self) -> TransferStats:
        open_loads, in_doubt = self._loads.counts()
        return self._recorder.snapshot(open_holds=len(self._source), open_loads=open_loads, in_doubt=in_doubt)

    def close(self) -> None:
        """Every open load ends with an error, every hold is released, and the agent is destroyed. Bounded."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._clock.close(self._times.close_timeout_s)
        self._source.close()
        at_rest = self._agent_loop.close(self._times.close_timeout_s) and self._close_agent()
        self._push.pushes.close()
        verdict = Verdict(FailureClass.CANCELLED, "the transceiver was closed")
        for load in self._loads.close():
            self._loads.fail(load, verdict, at_rest=at_rest and isinstance(load, LoadSession))
        self._control.close()

    def _close_agent(self) -> bool:
        """Only after its thread has ended. False when operations may go on."""
        try:
            self._agent.close()
        except TransferError as error:
            logger.error("%s", error.message)
            return False
        return True

    # -- ControlTarget ------------------------------------------------------------------------------------

    def answer_handshake(self, initiator: RankInfo) -> RankInfo:
        check_peer(self._local, replace(initiator, handle_key=b"-"))
        met = self._met.get(initiator.incarnation)
        self._met[initiator.incarnation] = initiator
        self._met.move_to_end(initiator.incarnation)
        if len(self._met) > _REMEMBERED_INITIATORS:
            self._met.popitem(last=False)
        # Who comes again with an agent we have met needs no help: its path is up.
        if met is None or met.agent_metadata != initiator.agent_metadata:
            self._attend(self._times.first_contact_s)
        return self._local

    def answer_heartbeat(self, incarnation: str, transfer_ids: Sequence[int]) -> list[int]:
        unknown = self._source.heartbeat(transfer_ids)
        if unknown:
            self._attend(self._times.reader_help_s)
        return unknown

    def answer_cancel(self, transfer_id: int, nonce: bytes) -> CancelOutcome:
        return self._help_reader(self._source.cancel(transfer_id, nonce))

    def answer_open_push(self, incarnation: str, grant: bytes, process: ProcessIdentity) -> bytes:
        self._push.grants.opened(grant, incarnation, process)
        self._wake()
        return agent_digest(self._local.agent_metadata)

    def answer_check_push(self, transfer_id: int, nonce: bytes, *, stop: bool) -> PushReport:
        return self._push.pushes.report(transfer_id, nonce, stop=stop)

    def _help_reader(self, outcome: CancelOutcome) -> CancelOutcome:
        """A read in progress may need our agent to end, and its pages are not free before: we stay awake a little.
        Should that not do, the reader's heartbeats, about a transfer we do not know any more, wake us again."""
        if outcome is CancelOutcome.IN_FLIGHT:
            self._attend(self._times.reader_help_s)
        return outcome

    # -- agent thread -------------------------------------------------------------------------------------

    def _agent_step(self) -> float | None:
        for peer, message in self._drain():
            self._notified(peer, message)
        now_s = time.monotonic()
        contact_s = self._peers.step(now_s)
        writing_s = self._push.pushes.step()  # before what it makes suspect is fenced
        operation_s = self._destination.step(now_s)
        advertised_s, reader_s = self._source.youngest()
        granted_s, writer_s = self._push.grants.youngest()
        demand = PollDemand(
            operation_s=_age(_latest(contact_s, operation_s, writing_s), now_s),
            reader_s=_age(_latest(reader_s, writer_s), now_s),
            advertised_s=_age(_latest(advertised_s, granted_s), now_s),
            attention_s=max(0.0, self._attention_until_s - now_s),
        )
        looks = (self._next_look_s(demand), self._destination.until_fence_s(now_s))
        return min((look_s for look_s in looks if look_s is not None), default=None)

    def _notified(self, peer: str, message: bytes) -> None:
        """Of a push to here, or of a hand-off that is read from here."""
        try:
            note = decode_notification(message)
        except TransferError as error:
            logger.warning("dropped: %s", error.message)
            self._recorder.stray_notification()
            return
        if not self._push.grants.notified(peer, note):
            self._source.notified(note, self._met.get(peer))

    @abstractmethod
    def _next_look_s(self, demand: PollDemand) -> float | None:
        """Seconds until the agent thread must look again by itself; None: not before something happens."""

    def _drain(self) -> list[tuple[str, bytes]]:
        """An agent that cannot be asked, because a fence of it failed half-way, must not keep the next from coming."""
        try:
            arrived = self._agent.drain_notifications()
        except TransferError as error:
            if error.message != self._drain_error:
                logger.error("%s", error.message)
            self._drain_error = error.message
            return []
        self._drain_error = ""
        return arrived

    def _sent(self) -> None:
        """A notification may need a few more calls into the agent to leave this process."""
        self._attention_until_s = max(self._attention_until_s, time.monotonic() + self._times.after_send_s)

    def _fenced(self, peer: str) -> None:
        self._local = replace(self._local, agent_metadata=self._agent.metadata())
        self._push.pushes.path_was_cut(peer)
        self._push.grants.path_was_cut(peer)

    def _attend(self, seconds: float) -> None:
        self._attention_until_s = max(self._attention_until_s, time.monotonic() + seconds)
        self._agent_loop.wake()

    # -- clock thread -------------------------------------------------------------------------------------

    def _clock_step(self) -> float | None:
        now_s = time.monotonic()
        upcoming = (
            self._source.sweep(now_s),
            self._expire(now_s),
            self._push.grants.check(now_s),
            self._push.pushes.overdue(now_s),
        )
        wake_at = [at_s for at_s in upcoming if at_s is not None]
        if self._loads.counts()[0]:
            if now_s >= self._heartbeat_at_s:
                self._heartbeat_at_s = now_s + self._times.heartbeat_s
                self._send_heartbeats()
            wake_at.append(self._heartbeat_at_s)
        return max(0.001, min(wake_at) - now_s) if wake_at else None

    def _expire(self, now_s: float) -> float | None:
        """Ends what is overdue: through the agent thread, or without it when that has not managed in time."""
        wake_at = []
        for load in self._loads.open():
            if load.deadline_s == math.inf:
                continue
            if now_s < load.deadline_s:
                wake_at.append(load.deadline_s)
            elif now_s < load.deadline_s + self._times.grace_s:
                self._post_overdue(load)
                wake_at.append(load.deadline_s + self._times.grace_s)
            else:
                verdict = load.verdict or Verdict(FailureClass.TIMEOUT, "the transfer did not finish in time")
                self._loads.fail(load, verdict, at_rest=False)
                self._post_overdue(load)
        return min(wake_at, default=None)

    def _post_overdue(self, load: InboundSession) -> None:
        if isinstance(load, LoadSession):
            self._agent_loop.post(lambda: self._destination.overdue(load))
        elif isinstance(load, GrantSession):
            self._push.grants.taken_back(load)

    def _send_heartbeats(self) -> None:
        for (endpoint, incarnation), transfer_ids in self._loads.by_peer().items():
            self._send_heartbeat(endpoint, incarnation, transfer_ids)

    def _send_heartbeat(self, endpoint: str, incarnation: str, transfer_ids: list[int]) -> None:
        answer = self._control.heartbeat(
            endpoint, self._local.incarnation, transfer_ids, timeout_s=self._times.heartbeat_s
        )
        answer.add_done_callback(lambda ended: self._heartbeat_answered(endpoint, incarnation, ended))

    def _heartbeat_answered(self, endpoint: str, incarnation: str, answer: Future[tuple[int, ...]]) -> None:
        """A missed one changes nothing by itself: the lease covers many, and the load has its own deadline."""
        error = answer.exception()
        if error is not None:
            logger.warning("heartbeat to %s: %s", endpoint, error)
            return
        for load in self._loads.of_transfers(incarnation, answer.result()):
            self._loads.sentence(load, Verdict(FailureClass.LEASE, "the source no longer holds the blocks"))
            self._post_sentenced(load)

    def _post_sentenced(self, load: InboundSession) -> None:
        """Ends a load that nobody waits for any more. Its operation gets a while to come to rest, then its peer,
        which may have stopped for good, is fenced: the pages are wanted elsewhere."""
        load.deadline_s = min(load.deadline_s, time.monotonic() + self._times.rest_s)
        if isinstance(load, LoadSession):
            self._agent_loop.post(lambda: self._destination.sentenced(load))
        elif isinstance(load, GrantSession):
            self._push.grants.taken_back(load)
        self._clock.wake()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TransferError("the transceiver is closed")


def _register(identity: WorkerIdentity, pools: Sequence[KVPool], agent: Agent) -> RankInfo:
    # Layer groups may share one buffer: the longest region from an address covers the others.
    longest: dict[int, MemRegion] = {}
    for pool in pools:
        known = longest.get(pool.region.addr)
        if known is None or known.nbytes < pool.region.nbytes:
            longest[pool.region.addr] = pool.region
    for region in (*longest.values(), *(pool.generation_region for pool in pools)):
        agent.register(region)
    return RankInfo(
        worker=identity.worker,
        role=identity.role,
        incarnation=identity.incarnation,
        endpoint=identity.endpoint,
        model_fingerprint=identity.model_fingerprint,
        resolution=identity.resolution,
        layouts=tuple(pool.layout for pool in pools),
        pools=tuple(pool.region for pool in pools),
        generations=tuple(pool.generation_region for pool in pools),
        agent_metadata=agent.metadata(),
        handle_key=new_handle_key(),
        tp_rank=identity.place.tp_rank,
        tp_size=identity.place.tp_size,
        pp_rank=identity.place.pp_rank,
        pp_size=identity.place.pp_size,
    )


def _chain(source: Future[RankInfo], target: Future[RankInfo]) -> None:
    """Passes one future's outcome on to another."""

    def resolved(ended: Future[RankInfo]) -> None:
        error = ended.exception()
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(ended.result())

    source.add_done_callback(resolved)


def _latest(*moments_s: float | None) -> float | None:
    return max((moment_s for moment_s in moments_s if moment_s is not None), default=None)


def _age(started_s: float | None, now_s: float) -> float | None:
    return None if started_s is None else now_s - started_s
