"""A worker process whose agent and forward pass misbehave on command: `kvferry.cluster.standalone` with a second
ear on stdin, one JSON object per line. Run as a script, with the arguments of that module."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import kvferry.transceiver.nixl as nixl
from kvferry.cluster.standalone import main
from kvferry.engine import ModelRunner
from kvferry.transceiver import Agent
from kvferry.transceiver.faulty import Fault, FaultyAgent, Target


class _Ear:
    """What the test says. The agent comes to be before the worker serves, so no command arrives too early."""

    def __init__(self) -> None:
        self.agent: FaultyAgent | None = None
        self._broken_steps = 0

    def listen(self) -> None:
        for line in sys.stdin:
            self._obey(json.loads(line))
            print(json.dumps({"obeyed": line}), flush=True)

    def _obey(self, command: dict[str, Any]) -> None:
        assert self.agent is not None
        if command["do"] == "break_steps":
            self._broken_steps = command["count"]
        elif command["do"] == "calm":
            self.agent.calm()
        elif command["do"] == "fail_fences":
            self.agent.fail_fences(command["count"])
        else:
            self.agent.inject(
                Fault(command["do"]),
                Target(command["target"]),
                skip=command["skip"],
                count=command["count"],
                delay_s=command["delay_s"],
            )

    def broken(self) -> bool:
        self._broken_steps -= 1
        return self._broken_steps >= 0


def _install(ear: _Ear) -> None:
    make_agent, execute = nixl.NixlAgent, ModelRunner.execute

    def faulty(incarnation: str, plugins: Sequence[str]) -> Agent:
        ear.agent = FaultyAgent(make_agent(incarnation, plugins))
        return ear.agent

    def run(self: ModelRunner, *arguments: Any) -> Any:
        if ear.broken():
            raise RuntimeError("a step that fails on command")
        return execute(self, *arguments)

    nixl.NixlAgent = faulty  # type: ignore[assignment,misc]
    ModelRunner.execute = run  # type: ignore[method-assign]


if __name__ == "__main__":
    ear = _Ear()
    _install(ear)
    threading.Thread(target=ear.listen, daemon=True).start()
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the listener may sit in a read of stdin, which an orderly exit would wait for
