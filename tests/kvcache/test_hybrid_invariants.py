"""Invariants of caches with recurrent states, checked after every step of random histories."""

from __future__ import annotations

import pytest
from hybrid_machine import HybridMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


class V1Machine(HybridMachine):
    version = "V1"


class V2Machine(HybridMachine):
    version = "V2"


class V2PythonMachine(HybridMachine):
    version = "V2"
    core = "python"


class V2HostMachine(HybridMachine):
    version = "V2"
    host_blocks = 30


@pytest.mark.parametrize("machine", [V1Machine, V2Machine, V2PythonMachine, V2HostMachine])
def test_every_step_keeps_the_invariants(machine: type[HybridMachine], few_histories: settings) -> None:
    run_state_machine_as_test(machine, settings=few_histories)
