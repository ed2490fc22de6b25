"""The managers' invariants, checked after every step of random histories."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_machine import CHUNKED, FULL, MLA, WINDOW, ManagerMachine
from v1_machine import V1Machine

from kvferry.kvcache import external


class V1HostMachine(V1Machine):
    host_blocks = 9
    debug = True


class V1ConnectorMachine(V1Machine):
    """Little host memory, so that the store outside has what neither pools nor tier have."""

    external = True
    host_blocks = 5
    debug = True


class V2Machine(ManagerMachine):
    version = "V2"
    layouts = (FULL, WINDOW, CHUNKED)
    drops_stale = True


class V2PythonMachine(V2Machine):
    core = "python"


class V2HostMachine(V2Machine):
    host_blocks = 9


class V2UniformHostMachine(V2HostMachine):
    layouts = (FULL, MLA)
    drops_stale = False
    debug = True
    core = "python"


class V2UniformMachine(ManagerMachine):
    version = "V2"
    layouts = (FULL, MLA)
    debug = True


class V2WindowsOnlyMachine(ManagerMachine):
    version = "V2"
    layouts = (WINDOW, CHUNKED)
    drops_stale = True


@pytest.mark.parametrize(
    "machine",
    [
        V1Machine,
        V1HostMachine,
        V1ConnectorMachine,
        V2Machine,
        V2PythonMachine,
        V2HostMachine,
        V2UniformHostMachine,
        V2UniformMachine,
        V2WindowsOnlyMachine,
    ],
)
def test_every_step_keeps_the_invariants(
    machine: type[ManagerMachine], sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "PAUSE_S", 0.0)  # a connector that failed is asked again at once
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
