"""An agent that wraps any other and misbehaves on command: what the fault tests are built on."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvferry.core import MemRegion, TransferError
from kvferry.transceiver.base import Agent, CopyArray, Direction, Operation, OpState


class Fault(Enum):
    DELAY = "delay"
    """Takes `delay_s` longer."""
    LATE = "late"
    """The bytes of an operation move `delay_s` later than they should, also when nobody waits for them any more."""
    DROP = "drop"
    """A notification is lost; an operation ends in an error, and nothing moved."""
    CORRUPT = "corrupt"
    """The first byte (of every copy, of the message) arrives inverted."""
    BLACK_HOLE = "black_hole"
    """An operation stays SUBMITTED until its peer is fenced. `land_late_writes` makes it happen after all."""
    DUPLICATE = "duplicate"
    """Happens twice."""
    BLOCK = "block"
    """`submit` does not return before `unblock`."""


class Target(Enum):
    OPERATION = "operation"
    NOTIFICATION = "notification"


@dataclass(slots=True)
class _Rule:
    fault: Fault
    target: Target
    skip: int
    count: int
    delay_s: float


class FaultyAgent(Agent):
    """Behaves as `inner` until told otherwise. `inject` may be called from any thread."""

    def __init__(self, inner: Agent) -> None:
        self.inner = inner
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._fence_failures = 0
        self._unblocked = threading.Event()
        self._black_holes: list[BlackHole] = []
        self._delayed: list[tuple[float, str, bytes]] = []
        self._late: list[_Late] = []

    def inject(
        self,
        fault: Fault,
        target: Target = Target.OPERATION,
        *,
        skip: int = 0,
        count: int = 1,
        delay_s: float = 0.0,
    ) -> None:
        """After `skip` more operations (or notifications), the next `count` suffer `fault`."""
        with self._lock:
            self._rules.append(_Rule(fault, target, skip, count, delay_s))

    def calm(self) -> None:
        """Forgets what was to go wrong and has not yet."""
        with self._lock:
            self._rules.clear()
            self._fence_failures = 0

    def fail_fences(self, count: int) -> None:
        with self._lock:
            self._fence_failures += count

    def unblock(self) -> None:
        self._unblocked.set()

    def land_late_writes(self) -> int:
        """Executes every operation in a black hole that was not fenced, as a stopped peer does when it continues.
        Returns how many."""
        landed = [hole for hole in self._black_holes if hole.poll() is OpState.SUBMITTED]
        for hole in landed:
            hole.land()
        return len(landed)

    # -- Agent --------------------------------------------------------------------------------------------

    @property
    def writes_land(self) -> bool:
        return self.inner.writes_land

    def register(self, region: MemRegion) -> None:
        self.inner.register(region)

    def deregister(self, region: MemRegion) -> None:
        self.inner.deregister(region)

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def load_peer(self, incarnation: str, metadata: bytes) -> None:
        self.inner.load_peer(incarnation, metadata)

    def forget_peer(self, incarnation: str) -> None:
        self.inner.forget_peer(incarnation)

    def submit(self, direction: Direction, peer: str, copies: CopyArray) -> Operation:
        rule = self._take(Target.OPERATION)
        if rule is None:
            return self.inner.submit(direction, peer, copies)

        def submit() -> Operation:
            return self.inner.submit(direction, peer, copies)

        if rule.fault is Fault.BLACK_HOLE:
            hole = BlackHole(peer, submit)
            self._black_holes.append(hole)
            return hole
        if rule.fault is Fault.LATE:
            late = _Late(peer, submit, time.monotonic() + rule.delay_s)
            self._late.append(late)
            return late
        if rule.fault is Fault.DROP:
            return _Failed()
        if rule.fault is Fault.BLOCK:
            self._unblocked.wait()
        if rule.fault is Fault.DUPLICATE:
            submit()
        if rule.fault is Fault.DELAY:
            return _Delayed(submit(), time.monotonic() + rule.delay_s)
        return _Corrupting(submit(), copies) if rule.fault is Fault.CORRUPT else submit()

    def notify(self, peer: str, message: bytes) -> None:
        rule = self._take(Target.NOTIFICATION)
        fault = rule.fault if rule is not None else None
        if rule is not None and fault is Fault.DELAY:
            self._delayed.append((time.monotonic() + rule.delay_s, peer, message))
            return
        if fault in (Fault.DROP, Fault.BLACK_HOLE):
            return
        if fault is Fault.CORRUPT:
            message = bytes([message[0] ^ 0xFF]) + message[1:]
        self.inner.notify(peer, message)
        if fault is Fault.DUPLICATE:
            self.inner.notify(peer, message)

    def drain_notifications(self) -> list[tuple[str, bytes]]:
        for late in self._late:
            late.advance()
        due = [entry for entry in self._delayed if entry[0] <= time.monotonic()]
        for entry in due:
            self._delayed.remove(entry)
            self.inner.notify(entry[1], entry[2])
        return self.inner.drain_notifications()

    def fence(self, peer: str) -> None:
        with self._lock:
            failing = self._fence_failures > 0
            self._fence_failures -= failing
        if failing:
            raise TransferError("a fence that fails on command")
        self.inner.fence(peer)
        for hole in self._black_holes:
            hole.fenced(peer)
        for late in self._late:
            late.fenced(peer)

    def close(self) -> None:
        for hole in self._black_holes:
            hole.fenced(hole.peer)
        self.inner.close()

    def _take(self, target: Target) -> _Rule | None:
        """The rule that applies to this call. A rule counts only the calls that reach it."""
        with self._lock:
            for rule in self._rules:
                if rule.target is not target:
                    continue
                if rule.skip:
                    rule.skip -= 1
                    return None
                rule.count -= 1
                if not rule.count:
                    self._rules.remove(rule)
                return rule
        return None


class BlackHole(Operation):
    """Submitted, and never heard of again, unless it lands."""

    def __init__(self, peer: str, submit: Callable[[], Operation]) -> None:
        self.peer = peer
        self._submit = submit
        self._state = OpState.SUBMITTED

    def poll(self) -> OpState:
        return self._state

    @property
    def error(self) -> str:
        return ""

    def release(self) -> None:
        """Gives up waiting; like the real thing, that alone does not stop it from landing."""

    def land(self) -> None:
        self._submit().release()

    def fenced(self, peer: str) -> None:
        if peer == self.peer:
            self._state = OpState.NOT_SUBMITTED


class _Late(Operation):
    """Submits when its time has come, whoever has released it before; only a fence stops it."""

    def __init__(self, peer: str, submit: Callable[[], Operation], at_s: float) -> None:
        self._peer = peer
        self._submit = submit
        self._at_s = at_s
        self._inner: Operation | None = None
        self._cut = False

    def advance(self) -> None:
        if self._inner is None and not self._cut and time.monotonic() >= self._at_s:
            self._inner = self._submit()

    def poll(self) -> OpState:
        self.advance()
        if self._inner is not None:
            return self._inner.poll()
        return OpState.NOT_SUBMITTED if self._cut else OpState.SUBMITTED

    @property
    def error(self) -> str:
        return self._inner.error if self._inner is not None else ""

    def release(self) -> None:
        if self._inner is not None:
            self._inner.release()

    def fenced(self, peer: str) -> None:
        self._cut = self._cut or peer == self._peer


class _Failed(Operation):
    def poll(self) -> OpState:
        return OpState.IN_DOUBT

    @property
    def error(self) -> str:
        return "an operation that fails on command"

    def release(self) -> None:
        pass


class _Delayed(Operation):
    def __init__(self, inner: Operation, not_before_s: float) -> None:
        self._inner = inner
        self._not_before_s = not_before_s

    def poll(self) -> OpState:
        state = self._inner.poll()
        if state is OpState.DONE and time.monotonic() < self._not_before_s:
            return OpState.SUBMITTED
        return state

    @property
    def error(self) -> str:
        return self._inner.error

    def release(self) -> None:
        self._inner.release()


class _Corrupting(Operation):
    def __init__(self, inner: Operation, copies: CopyArray) -> None:
        self._inner = inner
        self._pending = [int(addr) for addr in copies[:, 0]]

    def poll(self) -> OpState:
        state = self._inner.poll()
        if state is OpState.DONE:
            for addr in self._pending:
                byte = ctypes.c_ubyte.from_address(addr)
                byte.value ^= 0xFF
            self._pending = []
        return state

    @property
    def error(self) -> str:
        return self._inner.error

    def release(self) -> None:
        self._inner.release()
