"""The managers' invariants, checked after every step of random histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from kv_machine import ManagerMachine
from kv_model import CHUNKED, CONV, FULL, LENGTH, MLA, SSM, WINDOW
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


class V1EverythingMachine(V1ConnectorMachine):
    host_blocks = 5


class V2Machine(ManagerMachine):
    version = "V2"
    layouts = (FULL, WINDOW, CHUNKED)
    drops_stale = True


class V2HostMachine(V2Machine):
    host_blocks = 9
    copies_later = True
    debug = True


class V2AtOnceMachine(V2HostMachine):
    copies_later = False


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


class V2SharedMachine(V2Machine):
    typical = LENGTH


class V2SharedPythonHostMachine(V2SharedMachine):
    core = "python"
    host_blocks = 9
    copies_later = True


class V2HybridMachine(ManagerMachine):
    version = "V2"
    layouts = (FULL, CONV, SSM)
    debug = True


class V2HybridHostMachine(V2HybridMachine):
    layouts = (FULL, WINDOW, SSM)
    drops_stale = True
    host_blocks = 9
    core = "python"
    copies_later = True


MACHINES = [V1EverythingMachine, V2HostMachine]
"""One per manager, which does all that it can: 2,000 histories each."""
VARIANTS = [
    V1Machine,
    V1HostMachine,
    V1ConnectorMachine,
    V2Machine,
    V2UniformMachine,
    V2AtOnceMachine,
    V2UniformHostMachine,
    V2WindowsOnlyMachine,
    V2SharedMachine,
    V2SharedPythonHostMachine,
    V2HybridMachine,
    V2HybridHostMachine,
]


class CallerInPlace:
    """Handing every call to another thread has tests of its own, and here takes longer than all the rest."""

    stuck = False

    def __init__(self, name: str) -> None: ...

    def call(self, function: Callable[[], object], timeout_s: float) -> object:
        return function()

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that failed is asked again at once, and not written about ten thousand times."""
    monkeypatch.setattr(external, "PAUSE_S", 0.0)
    monkeypatch.setattr(external, "Caller", CallerInPlace)
    monkeypatch.setattr(external.logger, "disabled", True)


@pytest.mark.timeout(1800)  # a minute or two each on a core of its own
@pytest.mark.parametrize("machine", MACHINES)
def test_every_step_keeps_the_invariants(machine: type[ManagerMachine], histories: settings) -> None:
    run_state_machine_as_test(machine, settings=histories)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", VARIANTS)
def test_every_step_keeps_the_invariants_of_variants(machine: type[ManagerMachine], few_histories: settings) -> None:
    run_state_machine_as_test(machine, settings=few_histories)
