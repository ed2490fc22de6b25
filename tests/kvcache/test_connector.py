"""V1 with an external store: what it completed is saved, what it lacks is loaded, and whatever fails is a miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from memory_connector import MemoryConnector, Mood

from kvferry.core import ConfigError, GroupKind, KVLayout, block_digests
from kvferry.kvcache import KVCache, KVCacheManager, KVConnector, create_manager, external

SIZE = 4
FULL = KVLayout(GroupKind.FULL, (0, 1), 1, 2, tokens_per_block=SIZE)
WINDOW = KVLayout(GroupKind.WINDOW, (2,), 1, 2, tokens_per_block=SIZE, window=6)
LAYOUTS = (FULL, WINDOW)
BLOCK_NBYTES = sum(layout.slot_nbytes for layout in LAYOUTS)
PROMPT = list(range(100, 122))  # five full blocks and a part
DIGESTS = block_digests("", PROMPT[:20], SIZE)


def make(connector: KVConnector, blocks: int = 16, host_blocks: int = 0) -> KVCacheManager:
    return create_manager(
        "V1", LAYOUTS, blocks * BLOCK_NBYTES, connector=connector, host_bytes=host_blocks * BLOCK_NBYTES, debug=True
    )


def fill(manager: KVCacheManager, tokens: list[int], scope: str = "") -> KVCache:
    """An open, committed cache; each token's entry is its value."""
    cache = manager.open(scope, tokens, max_reuse=len(tokens))
    cache.reserve(len(tokens))
    for group, pool in enumerate(manager.pools):
        for position in range(cache.history, len(tokens)):
            pool.view[cache.block_table(group)[position // SIZE], :, :, :, position % SIZE] = float(tokens[position])
    cache.advance(len(tokens))
    cache.commit(tokens)
    return cache


def assert_written(manager: KVCacheManager, cache: KVCache, tokens: list[int]) -> None:
    for group, pool in enumerate(manager.pools):
        held = pool.view[list(cache.block_table(group))][:, -1, -1, 0, :, 0].flatten()[: cache.history]
        assert held.tolist() == [float(token) for token in tokens[: cache.history]]


def test_what_one_worker_completed_another_one_loads() -> None:
    connector = MemoryConnector()
    fill(make(connector), PROMPT).close()
    assert list(connector.blocks) == list(DIGESTS), "a block is saved after the one it hangs on"
    assert {len(block) for block in connector.blocks.values()} == {BLOCK_NBYTES}

    other = make(connector)
    assert other.match("", PROMPT) == 20
    cache = other.open("", PROMPT, max_reuse=21)
    assert (cache.reused, cache.committed, cache.history, cache.capacity) == (20, 20, 20, 20)
    assert_written(other, cache, PROMPT)
    assert (other.statistics().loaded_tokens, other.statistics().restored_tokens) == (20, 0)
    other.check_integrity()
    cache.close()
    assert other.counts().free == other.counts().total
    assert other.match("x", PROMPT) == 0, "another scope's blocks have other digests"


def test_nothing_is_asked_for_that_the_pools_have() -> None:
    connector = MemoryConnector()
    manager = make(connector)
    fill(manager, PROMPT).close()
    connector.calls.clear()
    manager.open("", PROMPT[:20], max_reuse=20).close()
    assert connector.calls == []
    saved = len(connector.blocks)
    fill(manager, PROMPT).close()
    assert "save" not in connector.calls
    assert len(connector.blocks) == saved


def test_pools_then_host_then_store() -> None:
    connector = MemoryConnector()
    manager = make(connector, blocks=7, host_blocks=2)
    fill(manager, PROMPT[:20]).close()
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(6 * SIZE)  # four blocks go down, the host tier keeps two of them
    hog.close()
    assert manager.tier_counts()[0].kept == 2 * len(LAYOUTS)
    cache = manager.open("", PROMPT, max_reuse=21)
    assert cache.reused == 20
    assert_written(manager, cache, PROMPT)
    assert (manager.statistics().restored_tokens, manager.statistics().loaded_tokens) == (8, 8)
    manager.check_integrity()


def test_no_more_is_loaded_than_there_are_pages_for() -> None:
    connector = MemoryConnector()
    fill(make(connector), PROMPT).close()
    manager = make(connector, blocks=5)
    hog = manager.open("x", [1], max_reuse=0)
    hog.reserve(2 * SIZE)
    cache = manager.open("", PROMPT, max_reuse=21)
    assert cache.reused == 12
    assert_written(manager, cache, PROMPT)
    manager.check_integrity()


@pytest.mark.parametrize("mood", [Mood.RAISES, Mood.CUTS_SHORT, Mood.FORGETS])
def test_a_store_that_misbehaves_is_a_miss(mood: Mood, caplog: pytest.LogCaptureFixture) -> None:
    connector = MemoryConnector()
    fill(make(connector), PROMPT).close()
    manager = make(connector)
    connector.mood = mood
    cache = fill(manager, PROMPT)
    assert_written(manager, cache, PROMPT)
    assert cache.reused == (8 if mood is Mood.FORGETS else 0)
    assert manager.statistics().connector_failures == (0 if mood is Mood.FORGETS else 1)
    assert ("KV connector" in caplog.text) == (mood is not Mood.FORGETS)
    manager.check_integrity()
    manager.close()
    assert connector.closed


def test_a_connector_that_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(external.time, "monotonic", lambda: now)
    connector = MemoryConnector()
    fill(make(connector), PROMPT).close()
    manager = make(connector)
    connector.mood = Mood.RAISES
    assert manager.match("", PROMPT) == 0
    connector.mood = Mood.GOOD
    connector.calls.clear()
    assert manager.match("", PROMPT) == 0
    fill(manager, [7] * 8).close()
    assert connector.calls == []
    now += external.PAUSE_S
    assert manager.match("", PROMPT) == 20


class HangingConnector(MemoryConnector):
    """Its loads wait until they are told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.most = 0

    def load(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        self.most = max(self.most, len(digests))
        self.go_on.wait(60)
        return super().load(digests)


def test_a_store_that_hangs_is_waited_for_once_and_left_alone_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(external, "CALL_LIMIT_S", 0.1)
    monkeypatch.setattr(external, "PAUSE_S", 0.0)
    connector = HangingConnector()
    connector.blocks = {digest: bytes(BLOCK_NBYTES) for digest in DIGESTS}
    manager = make(connector)
    assert manager.match("", PROMPT) == 20
    started = time.monotonic()
    cache = fill(manager, PROMPT)
    assert time.monotonic() - started < 30
    assert cache.reused == 0
    assert_written(manager, cache, PROMPT)
    assert manager.statistics().connector_failures == 1
    assert "load failed" in caplog.text
    cache.close()
    manager.clear_reuse()
    connector.calls.clear()
    assert manager.match("", PROMPT) == 0, "nobody else waits for it"
    assert connector.calls == []
    connector.go_on.set()
    deadline = time.monotonic() + 20
    while manager.match("", PROMPT) != 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    manager.close()
    assert connector.closed


def test_a_store_too_slow_for_a_long_prefix_serves_the_start_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "LOADED_AT_A_TIME", 2)
    monkeypatch.setattr(external, "CALL_LIMIT_S", 5.0)
    connector = HangingConnector()
    connector.blocks = {digest: bytes(BLOCK_NBYTES) for digest in DIGESTS}
    connector.go_on.set()
    clock = iter(range(0, 10_000, 4))  # every look at it, four seconds later: two parts, and the time is over
    monkeypatch.setattr(external.time, "monotonic", lambda: float(next(clock)))
    cache = make(connector).open("", PROMPT, max_reuse=21)
    assert 0 < cache.reused < 20
    assert cache.reused % (2 * SIZE) == 0
    assert connector.most == 2


def test_clearing_reuse_leaves_the_store_to_the_others() -> None:
    connector = MemoryConnector()
    manager = make(connector)
    fill(manager, PROMPT).close()
    manager.clear_reuse()
    assert manager.counts().cached == 0
    assert manager.match("", PROMPT) == 20


def test_a_fork_s_blocks_are_saved_once() -> None:
    connector = MemoryConnector()
    manager = make(connector)
    cache = fill(manager, PROMPT[:7])
    assert list(connector.blocks) == list(DIGESTS[:1])
    twin = cache.fork()  # type: ignore[attr-defined]
    for branch in (cache, twin):
        branch.reserve(8)
        for pool in manager.pools:
            pool.view[branch.block_table(0)[1], :, :, :, 3] = float(PROMPT[7])
        branch.advance(8)
        branch.commit(PROMPT[:8])
    assert connector.calls.count("save") == 2
    assert torch.frombuffer(bytearray(connector.blocks[DIGESTS[1]]), dtype=torch.float32)[-1] == float(PROMPT[7])


def test_v2_refuses_and_so_does_a_cache_without_reuse() -> None:
    with pytest.raises(ConfigError, match="V2 serves no external KV connector") as caught:
        create_manager("V2", LAYOUTS, 8 * BLOCK_NBYTES, connector=MemoryConnector())
    assert caught.value.field == "kv_cache.connector"
    with pytest.raises(ConfigError, match="prefix_reuse is off") as caught:
        create_manager("V1", LAYOUTS, 8 * BLOCK_NBYTES, connector=MemoryConnector(), prefix_reuse=False)
    assert caught.value.field == "kv_cache.connector"
