"""The PYTHON runtime: the agent thread polls the agent itself, as often as what is open asks for."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.kvcache import KVPool
from kvferry.transceiver.base import Agent
from kvferry.transceiver.control import ControlClient
from kvferry.transceiver.destination import Destination
from kvferry.transceiver.implementation import RuntimeTimes, WorkerIdentity
from kvferry.transceiver.loop import EventSleeper
from kvferry.transceiver.polling import PollDemand, poll_interval_s
from kvferry.transceiver.session_runtime import SessionRuntime


class PythonTransceiver(SessionRuntime):
    def __init__(
        self,
        identity: WorkerIdentity,
        pools: Sequence[KVPool],
        agent: Agent,
        control: ControlClient,
        times: RuntimeTimes,
    ) -> None:
        super().__init__(identity, pools, agent, control, times, sleeper=EventSleeper(), destination=Destination)

    def _next_look_s(self, demand: PollDemand) -> float | None:
        return poll_interval_s(demand)
