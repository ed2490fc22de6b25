"""What the MOONCAKE agent adds to the contract of every agent (test_agents.py)."""

from __future__ import annotations

import builtins
import json
import time
from typing import Any

import numpy as np
import pytest
from libraries import needs_mooncake

from kvferry.core import ConfigError, MemRegion, TransferError
from kvferry.transceiver.base import Direction, OpState
from kvferry.transceiver.mooncake import MooncakeAgent


def test_a_library_that_cannot_be_loaded_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ibverbs(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "mooncake.engine":
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_ibverbs)
    with pytest.raises(
        ConfigError, match=r"libibverbs\.so\.1.*pip install mooncake.*apt-get install --no-install-recommends"
    ) as caught:
        MooncakeAgent("near")
    assert caught.value.field == "transceiver.backend"


@needs_mooncake
def test_more_copies_than_are_submitted_at_once() -> None:
    near, far = MooncakeAgent("near"), MooncakeAgent("far")
    here, there = np.zeros(1000 * 16, dtype=np.uint8), np.random.default_rng(0).integers(0, 256, 16000, dtype=np.uint8)
    near.register(MemRegion(here.ctypes.data, here.nbytes))
    far.register(MemRegion(there.ctypes.data, there.nbytes))
    near.load_peer("far", far.metadata())
    order = np.random.default_rng(1).permutation(1000)
    rows = [[here.ctypes.data + 16 * to, there.ctypes.data + 16 * int(block), 16] for to, block in enumerate(order)]
    operation = near.submit(Direction.READ, "far", np.asarray(rows, dtype=np.uint64))
    deadline_s = time.monotonic() + 20
    while operation.poll() is OpState.SUBMITTED:
        assert time.monotonic() < deadline_s
    assert operation.poll() is OpState.DONE
    assert np.array_equal(here.reshape(1000, 16), there.reshape(1000, 16)[order])
    near.fence("far")
    assert operation.poll() is OpState.DONE
    near.close()
    far.close()


@needs_mooncake
def test_metadata_that_was_cut_or_changed_is_refused() -> None:
    near, far = MooncakeAgent("near"), MooncakeAgent("far")
    whole = far.metadata()
    damaged = [whole[:length] for length in range(0, len(whole), 5)]
    magic, _, body = whole.partition(b"\n")
    described = json.loads(body)
    changes: tuple[dict[str, Any], ...] = (
        {"regions": [[1]]},
        {"regions": [["a", 1]]},
        {"regions": [[-1, 1]]},
        {"regions": 5},
        {"segment": "nowhere"},
        {"mailbox": None},
        {"incarnation": 7},
    )
    damaged += [magic + b"\n" + json.dumps({**described, **change}).encode() for change in changes]
    for data in damaged:
        with pytest.raises(TransferError):
            near.load_peer("far", data)
    near.close()
    far.close()
