"""The workers the router knows: who is there, how loaded, and what runs on them. One event loop owns it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from kvferry.core import Lifecycle, NotFoundError, Role, UnavailableError
from kvferry.router.facts import WORKER_TRANSITIONS, WorkerFacts, WorkerState
from kvferry.router.policies import WorkerLoad
from kvferry.router.topology import Topology, build_topology

logger = logging.getLogger(__name__)

# Lost workers stay in the status for operators to see, up to so many.
_MAX_LOST = 64
_MAX_RETIRED = 1024


class WorkerLostError(UnavailableError):
    """A worker stopped answering, or was never there. Raised again as UNAVAILABLE when retries are spent."""


class RetiredIncarnationError(UnavailableError):
    """A worker reports under a name that a newer incarnation has taken over."""


class Lease:
    """One leg's place on one worker: counted as its load, ended when the worker is lost. A context manager."""

    __slots__ = ("_cancel", "_member", "lost_reason", "tokens")

    def __init__(self, member: Member, tokens: int) -> None:
        self._member = member
        self._cancel: Callable[[], object] | None = None
        self.tokens = tokens
        self.lost_reason: str | None = None

    @property
    def facts(self) -> WorkerFacts:
        return self._member.facts

    @property
    def worker(self) -> str:
        return self._member.facts.name

    def cancel_with(self, cancel: Callable[[], object]) -> None:
        """`cancel` is called when the worker is lost; at once if it has been lost already."""
        self._cancel = cancel
        if self.lost_reason is not None:
            cancel()

    def lose(self, reason: str) -> None:
        self.lost_reason = reason
        if self._cancel is not None:
            self._cancel()

    def release(self) -> None:
        self._member.leases.discard(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Member:
    """One incarnation of one worker, for as long as it is known."""

    __slots__ = ("facts", "gone", "last_report", "leases", "lifecycle", "reason", "session")

    def __init__(self, facts: WorkerFacts, now: float) -> None:
        self.facts = facts
        self.lifecycle = Lifecycle(facts.reported, WORKER_TRANSITIONS)
        self.reason = facts.reason
        self.last_report = now
        self.session = 0
        self.leases: set[Lease] = set()
        self.gone = asyncio.Event()

    @property
    def state(self) -> WorkerState:
        return self.lifecycle.state

    def load(self) -> WorkerLoad:
        return WorkerLoad(self.facts.name, len(self.leases), sum(lease.tokens for lease in self.leases))


@dataclass(frozen=True, slots=True)
class Session:
    """One Join stream. A worker that reconnects has a new one for the same member."""

    member: Member
    number: int

    @property
    def current(self) -> bool:
        return self.member.session == self.number and not self.member.lifecycle.ended


class WorkerPool:
    """Members by name. `topology` follows from them; `changed` wakes those who wait for a better one."""

    def __init__(self, lost_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._retired: deque[str] = deque(maxlen=_MAX_RETIRED)
        self._change = asyncio.Event()
        self._last_sweep = clock()
        self.topology = Topology()
        self.version = 0  # counts changes of the topology and of the prefill peers

    # -- what workers tell ------------------------------------------------------------------------------

    def join(self, facts: WorkerFacts) -> Session:
        """The first report of a stream. Another incarnation under the same name replaces the old one.

        Raises RetiredIncarnationError when this incarnation was itself replaced before.
        """
        if facts.incarnation in self._retired:
            raise RetiredIncarnationError(
                f"worker {facts.name} incarnation {facts.incarnation} was replaced by a newer one: "
                "two processes use this name; stop one",
                field="name",
            )
        member = self._members.get(facts.name)
        if member is not None and member.facts.incarnation != facts.incarnation:
            self._retired.append(member.facts.incarnation)
            self._lose(member, f"replaced by incarnation {facts.incarnation}")
        if member is None or member.lifecycle.ended:
            member = self._members[facts.name] = Member(facts, self._clock())
            logger.info("worker %s joined as %s, incarnation %s, at %s", *_names(facts))
        member.session += 1
        self._update(member, facts)
        self._forget_oldest_lost()
        self._rebuild()
        return Session(member, member.session)

    def report(self, session: Session, facts: WorkerFacts) -> None:
        """A later report of the same stream; ignored when the session is over."""
        if session.current:
            self._update(session.member, facts)

    def leave(self, session: Session, reason: str) -> None:
        """The stream ended. Nothing happens when the worker has opened a newer one."""
        if session.current:
            self._lose(session.member, reason)

    def sweep(self) -> None:
        """Loses members whose reports are overdue. Call several times per `lost_after_s`.

        When this process itself was held up, reports wait unread in its sockets: nobody is blamed for that time.
        """
        now = self._clock()
        held_up = now - self._last_sweep
        self._last_sweep = now
        for member in list(self._members.values()):
            if held_up > self._lost_after_s / 2:
                member.last_report += held_up
            elif not member.lifecycle.ended and now - member.last_report > self._lost_after_s:
                self._lose(member, f"no report for {now - member.last_report:.1f} s")

    # -- what the router finds out ----------------------------------------------------------------------

    def suspect(self, facts: WorkerFacts, reason: str) -> None:
        """A call to this worker failed below the application: no new work until it reports again."""
        member = self._members.get(facts.name)
        if member is None or member.facts.incarnation != facts.incarnation or member.state is not WorkerState.READY:
            return
        member.lifecycle.to(WorkerState.UNHEALTHY)
        member.reason = reason
        logger.warning("worker %s is suspect: %s", facts.name, reason)
        self._rebuild()

    def drain(self, name: str) -> WorkerFacts:
        """No new work for this worker; what runs there finishes. NotFoundError lists the workers there are."""
        member = self._members.get(name)
        if member is None or member.lifecycle.ended:
            known = ", ".join(member.facts.name for member in self.members() if not member.lifecycle.ended)
            raise NotFoundError(f"no worker {name!r} is here; there are: {known or 'none'}", field="worker")
        member.lifecycle.to(WorkerState.DRAINING)
        member.reason = "drained by an operator"
        self._rebuild()
        return member.facts

    # -- what routing asks ------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: member.facts.name)

    def loads(self, names: Iterable[str]) -> list[WorkerLoad]:
        return [self._members[name].load() for name in sorted(names)]

    def lease(self, name: str, tokens: int) -> Lease:
        member = self._members[name]
        lease = Lease(member, tokens)
        member.leases.add(lease)
        return lease

    def batch_capacity(self, roles: Iterable[Role]) -> int:
        """Sum of `max_batch` over ready workers of `roles`; 0 when there are none, or one reports none."""
        ready = [member.facts.max_batch for member in self._ready() if member.facts.role in set(roles)]
        return sum(ready) if all(ready) else 0

    def prefill_peers(self) -> list[WorkerFacts]:
        """Prefill workers that decode workers should be in contact with."""
        return [member.facts for member in self.members() if self._expects_work(member)]

    async def changed(self, version: int, timeout_s: float) -> None:
        """Waits, at most `timeout_s`, until the pool is not at `version` any more."""
        if version == self.version:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._change.wait()

    # -- inside -----------------------------------------------------------------------------------------

    def _update(self, member: Member, facts: WorkerFacts) -> None:
        before = (member.state, _routing_key(member.facts))
        member.facts = facts
        member.last_report = self._clock()
        if member.lifecycle.can(facts.reported):
            member.lifecycle.to(facts.reported)
            member.reason = facts.reason
        if before != (member.state, _routing_key(facts)):
            if before[0] is not member.state:
                logger.info(
                    "worker %s is %s%s", facts.name, member.state.value, f": {facts.reason}" * bool(facts.reason)
                )
            self._rebuild()

    def _lose(self, member: Member, reason: str) -> None:
        if member.lifecycle.ended:
            return
        member.lifecycle.to(WorkerState.LOST)
        member.reason = reason
        member.gone.set()
        logger.warning("worker %s is lost (%d requests there): %s", member.facts.name, len(member.leases), reason)
        for lease in list(member.leases):
            lease.lose(reason)
        self._rebuild()

    def _ready(self) -> list[Member]:
        return [member for member in self._members.values() if member.state is WorkerState.READY]

    @staticmethod
    def _expects_work(member: Member) -> bool:
        live = member.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.UNHEALTHY)
        return live and member.facts.role is Role.PREFILL

    def _rebuild(self) -> None:
        self.topology = build_topology([member.facts for member in self._ready()])
        self.version += 1
        self._change.set()
        self._change = asyncio.Event()

    def _forget_oldest_lost(self) -> None:
        lost = sorted((m for m in self._members.values() if m.lifecycle.ended), key=lambda member: member.last_report)
        for member in lost[:-_MAX_LOST]:
            del self._members[member.facts.name]


def _routing_key(facts: WorkerFacts) -> tuple[object, ...]:
    """What a topology depends on besides the state; everything else in a report may change every second."""
    return (
        facts.incarnation,
        facts.endpoint,
        facts.role,
        facts.resolution,
        facts.model_fingerprint,
        facts.kv_dtype,
        facts.max_batch,
        facts.peers_ready,
        tuple(sorted(facts.peer_errors.items())),
    )


def _names(facts: WorkerFacts) -> tuple[str, str, str, str]:
    return facts.name, facts.role.value, facts.incarnation, facts.endpoint
