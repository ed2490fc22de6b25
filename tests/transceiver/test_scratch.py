from __future__ import annotations

import pytest

from kvferry.transceiver.loopback import LoopbackAgent, LoopbackFabric
from kvferry.transceiver.scratch import Scratch


@pytest.mark.parametrize(("words", "size"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_blocks_are_registered_and_large_enough(words: int, size: int) -> None:
    agent = LoopbackAgent("here", LoopbackFabric())
    block = Scratch(agent).take(words)
    assert len(block.words) == size
    assert block.region.nbytes == 8 * size
    agent.deregister(block.region)  # raises unless it was registered


def test_returned_blocks_are_used_again_and_taken_ones_are_not_shared() -> None:
    scratch = Scratch(LoopbackAgent("here", LoopbackFabric()))
    first, second = scratch.take(10), scratch.take(10)
    assert first.region != second.region
    scratch.give(first)
    assert scratch.take(20) is first
    assert scratch.take(100).region not in (first.region, second.region)
