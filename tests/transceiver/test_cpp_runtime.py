"""What is the CPP runtime's own: the engine's thread is ahead of Python's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.core import Role, TokenRange
from kvferry.transceiver.stats import FailureClass


@pytest.mark.parametrize("world", ["cpp-nixl", "cpp-shm", "cpp-ucx"], indirect=True)
def test_a_load_is_good_although_its_source_has_let_go_before_python_heard_of_its_end(
    world: Any, eventually: Callable[..., None]
) -> None:
    """The engine sends DONE, the source forgets the transfer and says so to a heartbeat, and then Python wakes up."""
    prefill = world.worker(Role.PREFILL, "p:1")
    decode = world.worker(Role.DECODE, "d:1", heartbeat_s=0.02)
    decode.transceiver.connect("p:1")
    handle, hold = prefill.advertise([5, 6], 8)
    ready, awake = threading.Event(), threading.Event()
    agent_thread = decode.transceiver._agent_loop
    agent_thread.post(lambda: ready.wait(10))
    load = decode.load(handle, [3, 4], TokenRange(0, 8))
    agent_thread.post(lambda: awake.wait(10))
    (session,) = decode.transceiver._loads.open()
    ready.set()
    eventually(hold.released.is_set)
    eventually(lambda: session.verdict is not None)
    assert session.verdict.failure is FailureClass.LEASE
    awake.set()
    assert load.wait().error is None
    assert torch.equal(decode.blocks([3, 4]), prefill.blocks([5, 6]))
    assert decode.transceiver.stats().failures == {}
