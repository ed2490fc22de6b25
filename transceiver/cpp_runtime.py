"""The CPP runtime: the C++ engine moves, polls, checks and notifies on its own thread; Python plans and keeps sessions.

The agent thread only sleeps until the engine has news. It drives V1, as its capability says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvferry.core import TokenRange
from kvferry.kvcache import BlockHold, KVPool
from kvferry.transceiver.base import Agent, OpState
from kvferry.transceiver.control import ControlClient
from kvferry.transceiver.destination import Destination, notification_of
from kvferry.transceiver.implementation import RuntimeTimes, WorkerIdentity
from kvferry.transceiver.loop import Sleeper
from kvferry.transceiver.native.engine import Engine
from kvferry.transceiver.native_agent import NativeAgent, NativeOperation
from kvferry.transceiver.polling import PollDemand
from kvferry.transceiver.protocol import NotificationKind
from kvferry.transceiver.session_runtime import SessionRuntime
from kvferry.transceiver.sessions import LoadSession, SessionState
from kvferry.transceiver.stats import FailureClass

_CONTACT_POLL_S = 0.001
"""First contact is polled from Python: it happens once per peer."""


class EngineSleeper(Sleeper):
    """Sleeps in the engine, without the GIL, until there is news."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def sleep(self, seconds: float | None) -> None:
        self._engine.wait(seconds)

    def wake(self) -> None:
        self._engine.wake()


class CppDestination(Destination):
    """A load is one operation of the engine, from BEGIN to DONE or FAILED."""

    def _begin(self, load: LoadSession) -> None:
        if not self._loads.move(load, SessionState.TRANSFERRING):
            self.sentenced(load)
            return
        load.submitted_s = time.monotonic()
        self._active[load.load_id] = load
        self._start(load, notification_of(load, NotificationKind.BEGIN))

    def _submit(self, load: LoadSession) -> None:
        """Once more, after a fence took the first attempt along: BEGIN has been sent."""
        self._start(load, b"")

    def _start(self, load: LoadSession, begin: bytes) -> None:
        assert load.plan is not None
        assert load.reads is not None
        load.scratch = load.scratch or self.scratch.take(len(load.reads.expected))
        load.operation = _native(self._agent).load(
            self._peer_of(load),
            load.plan.copies,
            load.reads,
            load.scratch,
            begin,
            notification_of(load, NotificationKind.DONE),
            notification_of(load, NotificationKind.FAILED),
        )

    def sentenced(self, load: LoadSession) -> None:
        if isinstance(load.operation, NativeOperation) and load.operation.poll() is OpState.SUBMITTED:
            load.operation.sentenced = True
        super().sentenced(load)

    def _finished(self, load: LoadSession) -> None:
        self._checked(load, load.stale_words)

    def _at_rest(self, load: LoadSession, *, finished: bool) -> None:
        if isinstance(load.operation, NativeOperation):
            load.stale_words = load.operation.task.stale
            load.source_told = load.operation.task.source_told
            if finished and load.source_told and not load.stale_words and not load.operation.sentenced:
                # DONE went out before this thread heard of it, and the source has answered a heartbeat since.
                self._loads.pardon(load, FailureClass.LEASE)
        super()._at_rest(load, finished=finished)

    def _tell_end(self, load: LoadSession, kind: NotificationKind) -> None:
        if load.source_told:
            self._sent()
        else:
            super()._tell_end(load, kind)


class CppTransceiver(SessionRuntime):
    """Over any `NativeAgent`."""

    def __init__(
        self,
        identity: WorkerIdentity,
        pools: Sequence[KVPool],
        agent: NativeAgent,
        control: ControlClient,
        times: RuntimeTimes,
    ) -> None:
        self.engine = agent.engine
        super().__init__(
            identity, pools, agent, control, times, sleeper=EngineSleeper(agent.engine), destination=CppDestination
        )

    def advertise(
        self, hold: BlockHold, tokens: TokenRange, tokens_digest: bytes, on_release: Callable[[], None]
    ) -> bytes:
        def released() -> None:
            self._agent_loop.wake()  # which lets the engine stop looking, if this was the last
            on_release()

        return super().advertise(hold, tokens, tokens_digest, released)

    def _next_look_s(self, demand: PollDemand) -> float | None:
        waits = [age_s for age_s in (demand.advertised_s, demand.reader_s) if age_s is not None]
        self.engine.expect(min(waits, default=None), demand.attention_s)
        if self._peers.warming:
            return _CONTACT_POLL_S
        return demand.attention_s or None


def _native(agent: Agent) -> NativeAgent:
    assert isinstance(agent, NativeAgent), "CppTransceiver is built over a NativeAgent"
    return agent
